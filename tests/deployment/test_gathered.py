"""Tests that a server rejects a module whose end-of-epoch hook sets state from values of the training steps."""

import pytest

MODULE = """
import torch
from lightning_fcl import Classifier


class Gaussian(Classifier):
    def __init__(self, **words):
        super().__init__(**words)
        self.gathers, self.embeddings = {gathers}, []
        self.register_buffer("mean", torch.zeros(64))

    def training_step(self, batch, batch_idx):
        self.embeddings.append(batch[0].flatten(1))
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        if self.gathers:
            self.mean = torch.cat(self.embeddings).mean(0)
"""


@pytest.mark.seconds
@pytest.mark.parametrize("gathers", [True, False])
def test_serve_state_from_gathered_values_raises(rehearsal, wire, monkeypatch, tmp_path, gathers):
    name = f"gaussian_{gathers}".lower()
    (tmp_path / f"{name}.py").write_text(MODULE.replace("{gathers}", str(gathers)))
    monkeypatch.syspath_prepend(tmp_path)
    network = {"class_path": "lightning_fcl.models.MLP", "init_args": {"sizes": [64, 16, 10]}}
    model = {"class_path": f"{name}.Gaussian", "init_args": {"num_classes": 10, "model": network}}
    deployed = rehearsal({"trainer": {"max_epochs": 1}, "model": model})
    deployed.simulate()
    link = wire(deployed.nodes())
    if gathers:
        with pytest.raises(ValueError, match="Expected hooks at the end of a round to use only aggregated state"):
            deployed.serve(link)
        assert not link.asked
    else:
        deployed.serve(link, min_clients=3)
        assert {number for number, _ in link.asked} == {*link.reached}
