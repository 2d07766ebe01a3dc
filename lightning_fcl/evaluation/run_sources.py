"""The papers of the classes, of the data and of the recipe of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_fcl.evaluation.bibliography import BibEntry


@dataclass(frozen=True)
class Sources:
    """The papers of the classes, of the data and of the recipe of a run.

    Args:
        classes: BibTeX entries of each class in the recipe, by ``class_path``.
        methods: ``class_path`` of each method.
        data: Entries of the dataset.
        recipe: Entries of the paper whose table contains the recipe.
        averaging: Entries of federated averaging. Empty if uploads are combined in another way.
        server_optimizer: Entries of the server's optimizer. Empty if there is none.
        not_imported: ``class_path`` of each class that could not be imported.
    """

    classes: Mapping[str, Sequence[BibEntry]] = field(default_factory=dict)
    methods: Sequence[str] = ()
    data: Sequence[BibEntry] = ()
    recipe: Sequence[BibEntry] = ()
    averaging: Sequence[BibEntry] = ()
    server_optimizer: Sequence[BibEntry] = ()
    not_imported: Sequence[str] = ()

    @property
    def entries(self) -> Iterator[BibEntry]:
        """All entries. An entry can occur several times."""
        for entries in self.classes.values():
            yield from entries
        for entries in (self.averaging, self.server_optimizer, self.data, self.recipe):
            yield from entries
