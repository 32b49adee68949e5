"""A script that loads its data in a worker. In a run its micro batches take seconds, and rank 0 evaluates for long.

A fit finds it fastest with one sample at a time.
"""

import os
import time

import deepspeed
from evidence import Evidence, Samples, make_model, parse

import autods

MICRO_BATCH_S, EVALUATION_S = 1.5, 10.0
IS_RUN = "AUTODS_RUN" in os.environ


def evaluate():
    """Metrics in Python, as of a long evaluation: neither the engine nor the other rank hears of it."""
    until = time.monotonic() + EVALUATION_S
    while time.monotonic() < until:
        sum(range(100_000))


def main():
    options = parse()
    model = make_model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=options.deepspeed_config)
    session, evidence = autods.session(engine), Evidence(options.log, dies=False)
    may_evaluate = IS_RUN and os.environ["RANK"] == "0"
    for batch in session.batches(Samples(), num_workers=1):
        evidence.note(engine, batch["input_ids"])
        loss = engine(**batch).loss
        time.sleep(MICRO_BATCH_S if IS_RUN else 0.05 * len(batch["input_ids"]) ** 2)
        engine.backward(loss)
        engine.step()
        session.step_done(loss)
        if may_evaluate and session.step == 2:
            may_evaluate = False
            with session.evaluating():
                evaluate()


if __name__ == "__main__":
    main()
