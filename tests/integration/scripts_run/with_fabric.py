"""Lightning's Fabric with the three lines of a run."""

import lightning
import torch
from evidence import Evidence, Samples, make_model, parse
from lightning.fabric.strategies import DeepSpeedStrategy

import autods


def main():
    options = parse()
    fabric = lightning.Fabric(
        strategy=DeepSpeedStrategy(config=options.deepspeed_config), accelerator="gpu", devices=-1
    )
    fabric.launch()
    model = make_model()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    session, evidence = autods.session(model), Evidence(options.log)
    for batch in session.batches(Samples()):
        evidence.note(session.engine, batch["input_ids"])
        loss = model(**batch).loss
        fabric.backward(loss, model=model)
        optimizer.step()
        session.step_done(loss)


if __name__ == "__main__":
    main()
