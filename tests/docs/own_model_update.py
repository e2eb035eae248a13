"""Context of the update function of docs/guides/own-model.md."""
# SLOW

import torch

import helixrt


class Average(torch.nn.Module):
    """A moving average of a model's parameters."""

    def __init__(self, model):
        super().__init__()
        self.kept = torch.nn.ParameterList([p.detach().clone() for p in model.parameters()])

    @torch.no_grad()
    def follow(self, model):
        for kept, now in zip(self.kept, model.parameters(), strict=True):
            kept.lerp_(now, 0.1)


def train(session):
    model = session.parallelize(torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    average = Average(model)
    session.register(model=model, optimizers=[optimizer], extra={"average": average})
    before = [p.clone() for p in average.kept]

    # BLOCK

    for step in session.steps([torch.ones(2, 4)] * 4, until=3):
        for x in step:
            step.backward(model(x).square().mean())
        step.commit()
    assert not torch.equal(before[0], average.kept[0])


if __name__ == "__main__":
    helixrt.run(train, replicas=1, storage="runs")
