"""A DeepSpeed script with the three lines of a run."""

import deepspeed
from evidence import Evidence, Samples, make_model, parse

import autods


def main():
    options = parse()
    model = make_model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=options.deepspeed_config)
    session, evidence = autods.session(engine), Evidence(options.log)
    for batch in session.batches(Samples()):
        evidence.note(engine, batch["input_ids"])
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        session.step_done(loss)


if __name__ == "__main__":
    main()
