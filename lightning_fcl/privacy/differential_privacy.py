"""The settings of differential privacy, and the account of a federation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from lightning_fcl.errors import InvalidStateError, InvalidValueError, MissingValueError
from lightning_fcl.privacy.accounting import (
    Accountant,
    Release,
    check_delta,
    compute_epsilon,
    find_noise_multiplier,
    max_releases,
)
from lightning_fcl.privacy.ledger import Charge, PrivacyLedger
from lightning_fcl.validation import above, at_least, between, validate_fields, validated

MAX_SAMPLE_NORM = math.sqrt(17)
"""Maximum norm of a sample's contribution to the sums of a ridge regression: ``||h h^T||^2 + ||4 y h^T||^2 <= 17``."""


@dataclass
class AdaptiveClip:
    """A maximum update norm that follows a quantile of the clients' update norms (Andrew et al., 2021).

    After each round, the maximum norm C is multiplied by ``exp(-learning_rate (b - quantile))``. b is the share of
    clients whose update norm was at most C, with noise. The noise on b is part of the same release as the noise on the
    update, so b costs no further privacy: the update gets the noise multiplier ``(z^-2 - (2 s)^-2)^(-1/2)``. z is the
    noise multiplier of the release, and s is ``indicator_noise``.

    Args:
        quantile: Share of the clients whose updates are not clipped, between 0 and 1.
        start: Maximum norm of the first round, above 0.
        learning_rate: Learning rate of the maximum norm, above 0.
        indicator_noise: Standard deviation s of the noise on the number of clients whose updates are not clipped, above
            z / 2. None: the larger of z and a twentieth of the expected number of clients per round.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> AdaptiveClip(quantile=0.5).start
        0.1
    """

    citations: ClassVar[tuple[str, ...]] = ("andrew2021adaptive",)

    quantile: float = validated(0.5, between, 0, 1)
    start: float = validated(0.1, above, 0)
    learning_rate: float = validated(0.2, above, 0)
    indicator_noise: float | None = validated(None, above, 0)

    def __post_init__(self) -> None:
        validate_fields(self)

    def next_clip(self, clip: float, share: float) -> float:
        """Return the maximum norm of the next round.

        Args:
            clip: The maximum norm of this round.
            share: The share of clients whose updates were not clipped, with noise.
        """
        # A noisy share can be far outside [0, 1]. One round changes the norm by at most a factor of 10.
        exponent = -self.learning_rate * (share - self.quantile)
        return clip * math.exp(min(max(exponent, -math.log(10)), math.log(10)))


@dataclass
class DifferentialPrivacy:
    """Differential privacy of a federation: one budget for the whole stream (McMahan et al., 2018).

    With ``unit="client"``, two neighboring datasets differ in the whole data of one client, in all experiences (add or
    remove). With ``unit="sample"``, they differ in one training sample of one client. The number of clients, the split,
    the names of classes, and the plan of rounds and experiences are fixed and public.

    With ``unit="client"``, each client scales its update so that the joint L2 norm of everything that it uploads is at
    most ``clip``. Gaussian noise is added to the sum of the updates. Means are divided by a fixed number: the expected
    number of clients per round. A client without data contributes zeros.

    A `RidgeClassifier` with ``unit_norm=True`` supports both units. Its clients upload the sums A and B, with noise on
    A, and symmetric noise on B. A is multiplied by 4 when the norm is computed, and off-diagonal elements of B count
    twice. With ``unit="sample"``, the norm of a sample's contribution is at most ``sqrt(17)``, and nothing is clipped.
    The server computes ``W = A (B + beta I)^-1`` with a beta that depends only on the noise. Other modules support only
    ``unit="client"``.

    Args:
        unit: The unit whose data is protected: ``"client"`` or ``"sample"``.
        delta: Delta, above 0 and below 1 divided by the number of units.
        clip: Maximum joint norm of a client's update, above 0, or an `AdaptiveClip`. None for ``unit="sample"``.
        epsilon: Budget of the whole stream, above 0. Without ``noise_multiplier``, the noise is the smallest noise with
            which all rounds of the stream fit in the budget. With ``noise_multiplier``, the fit ends before a round
            that would exceed the budget. None: no budget.
        noise_multiplier: Standard deviation of the noise on the sum, divided by ``clip``, at least 0. None: calibrated
            to ``epsilon``. 0 adds no noise, and has no privacy.
        noise: ``"server"``: one noise is added to the sum. The server must be trusted. ``"client"``: each client adds
            all of the noise to its update before the upload, so the server need not be trusted.
        accountant: The accountant.
        ledger: Path of the privacy ledger's file. None: ``privacy-ledger.jsonl`` in the folder of the run for the
            commands of ``lightning-fcl``, otherwise no file.

    Raises:
        ValueError: If an argument is out of range, or both ``epsilon`` and ``noise_multiplier`` are missing.

    Example:
        >>> DifferentialPrivacy(unit="client", epsilon=4.0, delta=1e-5, clip=1.0).noise
        'server'
    """

    citations: ClassVar[tuple[str, ...]] = ("mcmahan2018private",)

    unit: Literal["client", "sample"]
    delta: float
    clip: float | AdaptiveClip | None = None
    epsilon: float | None = validated(None, above, 0)
    noise_multiplier: float | None = validated(None, at_least, 0)
    noise: Literal["server", "client"] = "server"
    accountant: Accountant = "pld"
    ledger: str | None = None

    def __post_init__(self) -> None:
        validate_fields(self)
        above(0, delta=self.delta)
        if self.unit == "client" and self.clip is None:
            raise MissingValueError(
                'Expected `clip` with `unit="client"`, but got None.',
                hint="Set a maximum norm, such as `clip=1.0`.",
                argument="clip",
            )
        if self.unit == "sample" and self.clip is not None:
            raise InvalidValueError(
                'Expected no `clip` with `unit="sample"`, because the norm of a sample\'s contribution is known, but '
                f"got {self.clip}.",
                hint='Remove `clip`, or use `unit="client"`.',
                argument="clip",
                value=self.clip,
            )
        if isinstance(self.clip, float | int):
            above(0, clip=self.clip)
        if self.epsilon is None and self.noise_multiplier is None:
            raise MissingValueError(
                "Expected `epsilon` or `noise_multiplier`, but got neither.",
                hint="Set a budget, such as `epsilon=4.0`.",
                argument="epsilon",
            )
        if self.clip == math.inf and self.noise_multiplier != 0:
            raise InvalidValueError(
                "Expected a finite `clip`, because the noise is proportional to it, but got inf.",
                hint="Use for example `clip=1.0`. Only with `noise_multiplier=0`, updates need no maximum norm.",
                argument="clip",
                value=self.clip,
            )

    def fingerprint(self) -> dict[str, Any]:
        """Return the settings that a checkpoint must match to be resumed."""
        return {name: value for name, value in asdict(self).items() if name != "ledger"}


class PrivacyAccount:
    """The privacy account of a federation: the calibrated noise, the ledger, and epsilon.

    Args:
        settings: The settings.

    Attributes:
        settings: The settings.
        num_clients: Number of clients of the federation. 0 before `start`.
        sampling_prob: Probability that a client is sampled for a round.
        noise_multiplier: Noise multiplier of each round's release.
        max_uses: Maximum number of rounds that can use data of the same unit.
        ledger: The ledger.
    """

    def __init__(self, settings: DifferentialPrivacy) -> None:
        self.settings = settings
        self.num_clients, self.sampling_prob, self.noise_multiplier, self.max_uses = 0, 1.0, 0.0, 0
        self.ledger = PrivacyLedger()
        # Hash of the settings that define the bits of all releases.
        self._hash = ""
        # Values of a checkpoint, until the fit starts: the hash, and the number of charges.
        self._restored: tuple[str, int] | None = None

    @property
    def expected_clients(self) -> float:
        """Expected number of clients in a round, by which the noised sums are divided."""
        return self.sampling_prob * self.num_clients

    @property
    def release(self) -> Release | None:
        """The release of each round, as the accountant counts it. None: there is no noise."""
        if self.noise_multiplier == 0:
            return None
        return Release(self.noise_multiplier, self._accounted_prob)

    @property
    def _accounted_prob(self) -> float:
        """The sampling probability that the accountant uses.

        With ``noise="client"``, the sampling of clients gives no amplification: the server sees who takes part.
        """
        return self.sampling_prob if self.settings.noise == "server" else 1.0

    @property
    def indicator_noise(self) -> float:
        """Standard deviation of the noise on the number of updates that are not clipped. 0 without `AdaptiveClip`."""
        clip = self.settings.clip
        if not isinstance(clip, AdaptiveClip) or self.noise_multiplier == 0:
            return 0.0
        return clip.indicator_noise or max(self.expected_clients / 20, self.noise_multiplier)

    @property
    def update_noise_multiplier(self) -> float:
        """Standard deviation of the noise on the sum of updates, divided by the maximum norm.

        With `AdaptiveClip`, this is more than the release's noise multiplier, because the indicators share the release.
        """
        if (indicator_noise := self.indicator_noise) == 0:
            return self.noise_multiplier
        return 1 / math.sqrt(self.noise_multiplier**-2 - (2 * indicator_noise) ** -2)

    @property
    def summed_deviation(self) -> float:
        """Standard deviation of the noise in a sum over all releases so far, for elements with the factor 1."""
        num_noises = 1.0 if self.settings.noise == "server" else self.expected_clients
        num_releases = self.ledger.num_charges(self._hash)
        return self.update_noise_multiplier * self.fixed_norm * math.sqrt(num_releases * num_noises)

    @property
    def fixed_norm(self) -> float:
        """The maximum norm of a unit's contribution without `AdaptiveClip`, or the first maximum norm with it."""
        clip = self.settings.clip
        if clip is None:
            return MAX_SAMPLE_NORM
        return clip.start if isinstance(clip, AdaptiveClip) else clip

    def start(
        self, num_clients: int, sampling_prob: float, num_rounds: int, num_units: int | None = None, max_uses: int = 0
    ) -> None:
        """Calibrate the noise for a stream.

        Args:
            num_clients: Number of clients of the federation.
            sampling_prob: Probability that a client is sampled for a round. 1: all clients.
            num_rounds: Number of rounds of the stream.
            num_units: Number of units. None: the number of clients.
            max_uses: Maximum number of rounds that can use data of the same unit. 0: all rounds.

        Raises:
            InvalidValueError: If ``delta`` is too large, or the noise of the indicators is too small.
        """
        settings = self.settings
        check_delta(settings.delta, num_clients if num_units is None else num_units, f"{settings.unit}s")
        self.num_clients, self.sampling_prob, self.max_uses = num_clients, sampling_prob, max_uses or num_rounds
        if settings.noise_multiplier is not None:
            self.noise_multiplier = settings.noise_multiplier
        else:
            assert settings.epsilon is not None  # `DifferentialPrivacy` checks this
            self.noise_multiplier = find_noise_multiplier(
                settings.epsilon, settings.delta, self.max_uses, self._accounted_prob, settings.accountant
            )
        if 0 < 2 * self.indicator_noise <= self.noise_multiplier:
            raise InvalidValueError(
                f"Expected `indicator_noise` of `AdaptiveClip` to be above half of the noise multiplier, which is "
                f"{self.noise_multiplier:.4g}, but got {self.indicator_noise:g}.",
                hint="Leave `indicator_noise` out for the default.",
                argument="indicator_noise",
                value=self.indicator_noise,
            )

    def open_ledger(self, settings_hash: str, is_writer: bool = True) -> None:
        """Open the ledger. If the fit is resumed, check that the ledger contains the releases of the checkpoint.

        Args:
            settings_hash: Hash of all settings that define the bits of the releases. If the fit is resumed, the hash of
                the checkpoint is used instead.
            is_writer: Whether this process writes the file. Of several processes, only one writes.

        Raises:
            InvalidStateError: If a release of the checkpoint is missing.
        """
        path = Path(self.settings.ledger) if self.settings.ledger is not None else None
        if path is not None:  # A ledger in memory keeps the releases of earlier fits with the same strategy.
            self.ledger = PrivacyLedger(path, is_writer)
        if other_units := self.ledger.units - {self.settings.unit}:
            raise InvalidStateError(
                f"Expected a privacy ledger whose releases have the unit {self.settings.unit}, but {path} contains "
                f"releases with the unit {other_units.pop()}. Their guarantees cannot be added.",
                hint="Use the unit of the ledger, or use another file as `ledger` if the data is other data.",
                argument="unit",
                value=self.settings.unit,
            )
        self._hash, num_charges = self._restored or (settings_hash, 0)
        self._restored = None
        if path is None:
            for round_idx in range(num_charges):
                self.charge(round_idx)
        self.ledger.check_contains(num_charges, self._hash)

    def rounds_in_budget(self, num_rounds: int) -> int:
        """Return the number of rounds of this run that the budget allows, at most ``num_rounds``."""
        settings, release = self.settings, self.release
        if settings.epsilon is None or release is None:
            return num_rounds
        earlier, uses = self.ledger.counts(other_than=self._hash), min(self.max_uses, num_rounds)
        allowed = max_releases(settings.epsilon, settings.delta, release, uses, earlier, settings.accountant)
        return num_rounds if allowed == uses else allowed

    def charge(self, round_idx: int) -> None:
        """Charge the release of a round before it happens. A repeated release is charged once."""
        if self.release is not None:
            release, unit = self.release, self.settings.unit
            self.ledger.charge(
                Charge(round_idx, self._hash, release.noise_multiplier, release.sampling_prob, unit, self.max_uses)
            )

    def epsilon(self) -> float | None:
        """Return the epsilon of all releases so far. None without noise, which has no guarantee."""
        if self.release is None:
            return None
        return compute_epsilon(self.ledger.counts().elements(), self.settings.delta, self.settings.accountant)

    def summary(self) -> dict[str, str | float]:
        """Return the guarantee and the noise as plain values, for the record of a run. Call this after `start`."""
        settings, is_adaptive = self.settings, isinstance(self.settings.clip, AdaptiveClip)
        return {
            "unit": settings.unit,
            "delta": settings.delta,
            "clip": f"adaptive, at first {self.fixed_norm:g}" if is_adaptive else f"{self.fixed_norm:.4g}",
            "noise": settings.noise,
            "noise_multiplier": self.noise_multiplier,
            "sampling_prob": self.sampling_prob,
            "accountant": settings.accountant,
        }

    def describe(self, num_rounds: int, num_parameters: int) -> dict[str, str]:
        """Return a description of the guarantee and the noise, by title. Call this after `start`.

        Args:
            num_rounds: Number of rounds of the fit.
            num_parameters: Number of values that a client uploads.
        """
        settings, release = self.settings, self.release
        if release is None:
            return {"privacy": "none, because `noise_multiplier` is 0"}
        uses = min(num_rounds, self.max_uses)
        releases = [*self.ledger.counts(other_than=self._hash).elements(), *[release] * uses]
        epsilon = compute_epsilon(releases, settings.delta, settings.accountant)
        observer = (
            "against everyone who sees the published models. The server is trusted, and has no guarantee"
            if settings.noise == "server"
            else "against everyone, also against the server"
        )
        num_noises = 1 if settings.noise == "server" else self.expected_clients
        lines = {
            "privacy": f"epsilon {epsilon:.3g} with delta {settings.delta:g} per {settings.unit}, {observer}",
            "noise": f"multiplier {self.noise_multiplier:.4g}, maximum norm {self.fixed_norm:.4g}, {num_rounds} "
            f"releases, of which at most {uses} contain data of the same {settings.unit}",
        }
        if settings.unit == "client":
            ratio = self.expected_clients / (self.update_noise_multiplier * math.sqrt(num_noises * num_parameters))
            lines["signal"] = (
                f"at most {ratio:.2g} times the norm of the noise, if all updates have the maximum norm and the same "
                "direction"
            )
        return lines

    def state_dict(self) -> dict[str, Any]:
        """Return the number of charges of this run and the hash of its settings, for a checkpoint."""
        return {"settings": self._hash, "charges": self.ledger.num_charges(self._hash)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the values of a checkpoint. Call this before `open_ledger`."""
        self._restored = str(state["settings"]), int(state["charges"])
