"""A script that loads its data in a worker. In a run its steps take seconds, and rank 0 evaluates for long."""

import os
import time

import deepspeed
from evidence import Evidence, Samples, make_model, parse

import autods

STEP_S, EVALUATION_S = 2.0, 15.0
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
    for batch in session.batches(Samples(), num_workers=1):
        evidence.note(engine, batch["input_ids"])
        loss = engine(**batch).loss
        if IS_RUN:
            time.sleep(STEP_S)
        engine.backward(loss)
        engine.step()
        session.step_done(loss)
        if IS_RUN and session.step == 2 and os.environ["RANK"] == "0":
            with session.evaluating():
                evaluate()


if __name__ == "__main__":
    main()
