"""A DeepSpeed script that builds its model under deepspeed.zero.Init, and notes whether it was partitioned."""

import json
from pathlib import Path

import deepspeed
from evidence import Samples, make_model, note_build, parse

import autods


def main():
    options = parse()
    deepspeed.init_distributed()
    config = json.loads(Path(options.deepspeed_config).read_text())
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = make_model()
    note_build(options.log, model)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=options.deepspeed_config)
    session = autods.session(engine)
    for batch in session.batches(Samples()):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        session.step_done(loss)


if __name__ == "__main__":
    main()
