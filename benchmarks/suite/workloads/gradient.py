"""Local epochs of SGD and their weighted mean, by hand and through our Trainer.

What only the Trainer needs is imported where it is used: other engines pay for their own imports.
"""

import copy

import numpy as np
import torch
import torch.nn.functional as F


class Gradient:
    """Each client takes one epoch of SGD over its samples, in their order; the mean weighs clients by their samples.

    Args:
        x: All samples, client after client.
        y: Their labels.
        sizes: Number of each client's samples.
        model: The network, as it begins.
        classes: Number of classes.
        batch_size: Samples per batch.
        clients_per_round: Clients per round; None: all.
    """

    rate = 0.01
    by_gradients = True

    def __init__(self, x, y, sizes, model, classes, batch_size, clients_per_round=None):
        self.x, self.y, self.model, self.classes, self.batch_size, self.drawn = (
            x,
            y,
            model,
            classes,
            batch_size,
            clients_per_round,
        )
        self.sizes = list(sizes)
        self.ends = np.cumsum(self.sizes).tolist()
        self.clients = len(self.sizes)
        self._local = None

    @property
    def nbytes(self):
        """Bytes of the samples, their labels and owners."""
        return self.x.nbytes + self.y.nbytes + 8 * len(self.y)

    def samples(self, client):
        """A client's samples and labels."""
        rows = slice(self.ends[client] - self.sizes[client], self.ends[client])
        return self.x[rows], self.y[rows]

    # By hand.

    def initial(self):
        """The server's state before the first round."""
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def local(self, server, client):
        """What a client makes of the server's state, and its weight."""
        self._local = self._local or copy.deepcopy(self.model).train()
        self._local.load_state_dict(server)
        optimizer = torch.optim.SGD(self._local.parameters(), lr=self.rate)
        x, y = self.samples(client)
        for inputs, labels in zip(x.split(self.batch_size), y.split(self.batch_size), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(self._local(inputs), labels).backward()
            optimizer.step()
        return self._local.state_dict(), len(y)

    def end(self, server, mean, total):
        """The server's state after a round."""
        return mean

    def to(self, device):
        """On a device."""
        self.x, self.y, self.model = self.x.to(device), self.y.to(device), self.model.to(device)
        return self

    # Through our Trainer.

    def task(self):
        """The LightningModule."""
        from lightning_fcl import Classifier

        return Classifier(copy.deepcopy(self.model), self.classes, lambda params: torch.optim.SGD(params, lr=self.rate))

    def state_of(self, task):
        """The server's state in it."""
        return {name: value.detach().cpu() for name, value in task.model.state_dict().items()}

    def stream(self, rounds):
        """The clients' data."""
        from lightning_fcl import FederatedStream
        from lightning_fcl.data.scenarios import ClassIncremental
        from lightning_fcl.data.split import Split

        return FederatedStream.from_arrays(
            self.x.cpu(),
            self.y.cpu(),
            np.arange(self.clients).repeat(self.sizes),
            classes=[str(label) for label in range(self.classes)],  # else those that are there would be renumbered
            scenario=ClassIncremental(num_experiences=1, rounds_per_experience=rounds),
            split=Split(test=0.0),
            batch_size=self.batch_size,
            shuffle=False,
            seed=0,
        )

    def trainer(self, rounds, callback, devices=1, **options):
        """A Trainer without all that costs time beside the rounds."""
        import lightning.pytorch as L

        from lightning_fcl import FederatedStrategy
        from lightning_fcl.simulation.trainer_choice import choose_group_size

        max_vectorized_clients = "auto"
        if devices > 1:  # two cohorts for each rank, at least
            max_vectorized_clients = min(choose_group_size(self.task()), (self.drawn or self.clients) // (2 * devices))
        return L.Trainer(
            strategy=FederatedStrategy(self.drawn or 1.0, max_vectorized_clients=max_vectorized_clients, seed=0),
            max_epochs=rounds,
            devices=devices,
            callbacks=[callback],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )
