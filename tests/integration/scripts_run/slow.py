"""A DeepSpeed script that loads its data in a worker. In a run, each of its steps takes some seconds."""

import os
import time

import deepspeed
from evidence import Evidence, Samples, make_model, parse

import autods

STEP_S = 2.0


def main():
    options = parse()
    model = make_model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=options.deepspeed_config)
    session, evidence = autods.session(engine), Evidence(options.log, dies=False)
    for batch in session.batches(Samples(), num_workers=1):
        evidence.note(engine, batch["input_ids"])
        loss = engine(**batch).loss
        if "AUTODS_RUN" in os.environ:
            time.sleep(STEP_S)
        engine.backward(loss)
        engine.step()
        session.step_done(loss)


if __name__ == "__main__":
    main()
