"""Callbacks for ``Trainer(callbacks=...)``: all methods, and callbacks that prepare or observe a federation.

The methods come from the package ``methods``. The modules of this package contain the callbacks that are not methods.
"""

import lazy_loader

from lightning_fcl import methods

_get_callback, _, _callbacks = lazy_loader.attach(
    __name__,
    submod_attrs={
        "continual_metrics": ["ContinualMetrics"],
        "activation_density": ["ActivationDensity"],
        "prediction_writer": ["PredictionWriter"],
        "pretrain": ["BaseSession", "Pretrain"],
        "progress": ["FederatedProgressBar"],
        "weight_averaging": ["ServerWeightAveraging"],
    },
)
# These names are for authors of methods. They are not callbacks.
_FOR_AUTHORS = {"Client", "Needs", "Server", "flatten", "with_prefix", "strip_prefix"}
__all__ = sorted({*_callbacks, *methods.__all__} - _FOR_AUTHORS)


def __getattr__(name: str) -> object:
    return getattr(methods, name) if name in methods.__all__ else _get_callback(name)


def __dir__() -> list[str]:
    return list(__all__)
