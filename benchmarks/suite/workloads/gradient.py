"""Federated averaging of local SGD, for the hand-written engines and for this library's Trainer.

The functions of `Gradient` import the packages that only this library's Trainer needs. The other engines therefore do
not spend time on these imports.
"""

import copy

import numpy as np
import torch
import torch.nn.functional as F


class Gradient:
    """A workload in which each client trains one epoch of SGD on its samples, without shuffling.

    The server computes the mean of the client models, weighted by the number of samples.

    Args:
        x: All samples, sorted by client.
        y: Labels of the samples.
        sizes: Number of samples of each client.
        model: Network with its initial weights.
        classes: Number of classes.
        batch_size: Number of samples per batch.
        clients_per_round: Number of sampled clients per round. If None, all clients train.
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
        """Number of bytes of all samples and labels, and of one client id (8 bytes) per sample."""
        return self.x.nbytes + self.y.nbytes + 8 * len(self.y)

    def samples(self, client):
        """Return the samples and labels of a client."""
        rows = slice(self.ends[client] - self.sizes[client], self.ends[client])
        return self.x[rows], self.y[rows]

    # The engines other than this library's Trainer use some of the following methods.

    def initial(self):
        """Return the server's state before the first round."""
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def local(self, server, client):
        """Return a client's state after local training from the server's state, and the weight of the client."""
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
        """Return the server's state after a round: the mean of the client states."""
        return mean

    def to(self, device):
        """Move the samples and the model to a device."""
        self.x, self.y, self.model = self.x.to(device), self.y.to(device), self.model.to(device)
        return self

    # The following methods are used by this library's Trainer.

    def task(self):
        """Return the LightningModule that trains the network with this library."""
        from lightning_fcl import Classifier

        return Classifier(copy.deepcopy(self.model), self.classes, lambda params: torch.optim.SGD(params, lr=self.rate))

    def state_of(self, task):
        """Return the server's state, read from the LightningModule."""
        return {name: value.detach().cpu() for name, value in task.model.state_dict().items()}

    def stream(self, rounds):
        """Return the federated stream with the samples of all clients."""
        from lightning_fcl import FederatedStream
        from lightning_fcl.data.scenarios import ClassIncremental
        from lightning_fcl.data.split import Split

        return FederatedStream.from_arrays(
            self.x.cpu(),
            self.y.cpu(),
            np.arange(self.clients).repeat(self.sizes),
            # Without names for all classes, the stream would renumber the classes in `y`.
            classes=[str(label) for label in range(self.classes)],
            scenario=ClassIncremental(num_experiences=1, rounds_per_experience=rounds),
            split=Split(test=0.0),
            batch_size=self.batch_size,
            shuffle=False,
            seed=0,
        )

    def trainer(self, rounds, callback, devices=1, **options):
        """Return a Trainer that writes no logs or checkpoints, and prints no progress bar or model summary."""
        import lightning.pytorch as L

        from lightning_fcl import FederatedStrategy
        from lightning_fcl.simulation.trainer_choice import choose_group_size

        max_vectorized_clients = "auto"
        # Each rank gets at least two client groups.
        if devices > 1:
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
