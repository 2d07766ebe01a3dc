"""Invalid answers that a malicious client can send, each with a pattern of the error message."""

from dataclasses import dataclass, field, replace
from math import ceil, prod
from types import SimpleNamespace

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import nn

from lightning_fcl.data.client_round import ClientRound, ClientRounds
from lightning_fcl.deployment.messages import to_record
from lightning_fcl.deployment.upload_validation import decode_upload, parse_upload
from lightning_fcl.federation.client_store import ClientStore
from lightning_fcl.federation.server import FederatedServer

BIG = 2**63 - 1
FLOAT = "torch.float32"


def server_with(state, rule="mean"):
    """Return a server whose state has the given tensors."""
    server = FederatedServer(ClientStore())
    server.start_fit(nn.Module(), extra_tensors={name: (value, rule) for name, value in state.items()})
    return server


def read_upload(message, sent, client, server, limits):
    """Parse an upload as the server does.

    Return a namespace with the numbers of samples and replay samples, whether training has diverged, and the decoded
    state. The state is empty if the upload has no samples.
    """
    upload = parse_upload(message.record(), sent, client, server.state, limits)
    state = {}
    if upload.num_samples:
        part = ClientRounds.from_rounds([ClientRound(client, 0, num_samples=upload.num_samples)])
        state = {n: value[0] for n, value in decode_upload(upload, server, part, limits).values.items()}
    return SimpleNamespace(
        samples=upload.num_samples, rehearsed=upload.num_replay_samples, diverged=upload.has_diverged, state=state
    )


@dataclass(frozen=True)
class Message:
    """The parts of a transmitted answer. Tests change these parts."""

    head: dict
    arrays: dict
    others: dict = field(default_factory=dict)

    @classmethod
    def of(cls, parcel):
        return cls.of_record(to_record(parcel))

    @classmethod
    def of_record(cls, record):
        return cls(dict(record.config_records["head"]), dict(record.array_records["arrays"]))

    def record(self):
        """Return the answer as a Flower record."""
        own = {"head": ConfigRecord(self.head), "arrays": ArrayRecord(self.arrays)}
        return RecordDict({name: value for name, value in {**own, **self.others}.items() if value is not None})


def saying(**words):
    """Return a function that returns a message with changed or additional header values."""
    return lambda message: replace(message, head={**message.head, **words})


def without(*words):
    """Return a function that returns a message without some header values."""
    return lambda message: replace(message, head={n: v for n, v in message.head.items() if n not in words})


def holding(**records):
    """Return a function that returns a message with added or replaced records. A record of value None is removed."""
    return lambda message: replace(message, others=records)


def first(message):
    """Return the name of the smallest float32 array in the message."""
    names = [name for name, array in message.arrays.items() if array.dtype == FLOAT]
    return min(names, key=lambda name: prod(message.arrays[name].shape))


def put(data=None, dtype=None, shape=None, stype=None):
    """Return a function that changes the bytes, type, shape or encoding of one array. `first` selects the array.

    ``data`` is the new bytes, or a function of the old bytes.
    """

    def change(message):
        name = first(message)
        old = message.arrays[name]
        made = old.data if data is None else data(old.data) if callable(data) else data
        new = Array(dtype or old.dtype, old.shape if shape is None else shape, stype or old.stype, made)
        return replace(message, arrays={**message.arrays, name: new})

    return change


def numbers(make):
    """Return a function that replaces the values of each float32 array by a function of the honest values."""

    def change(message):
        arrays = dict(message.arrays)
        for name, array in message.arrays.items():
            if array.dtype == FLOAT:
                number = prod(array.shape)
                begins = 0 if len(array.data) == 4 * number else ceil(number / 8)
                with np.errstate(over="ignore"):
                    made = make(np.frombuffer(array.data, np.float32, offset=begins)).astype(np.float32)
                data = array.data[:begins] + made.tobytes()
                arrays[name] = Array(array.dtype, array.shape, array.stype, data)
        return replace(message, arrays=arrays)

    return change


def more(name):
    """Return a function that returns a message with an additional array of one float32 number."""
    return lambda message: replace(
        message, arrays={**message.arrays, name: Array(FLOAT, (1,), "bytes", np.zeros(1, np.float32).tobytes())}
    )


def less(message):
    """Return the message without one array. `first` selects the array."""
    name = first(message)
    return replace(message, arrays={n: v for n, v in message.arrays.items() if n != name})


WHOLE = "Expected `samples` to be a whole number from 0 to [0-9]+, but got"
TOO_MANY = "Expected `rehearsed` to be a whole number from 0 to [0-9]+, but got"
RECORDS = "Expected only a config record `head` and an array record `arrays` from .*, but got"
FORM_OF_ARRAYS = "Expected the arrays from .* to be encoded as `bytes`, but got another encoding of `.*`"
NO_CODE = "Expected an error of .* to be a code and the name of an argument, but got"
NESTED = "Expected the header to contain only text, numbers and booleans, but `.*` has another type"
LONG = "Expected the header of a message to have at most [0-9]+ characters, but got"
LARGE = "Expected at most [0-9]+ bytes of arrays from client 1, but got"
NO_ARRAY = f"Expected `.*` to have a supported type, and the number of bytes that the shape requires, but got|{LARGE}"
OLD = "The answer belongs to another message or client"
ENTRIES = f"Expected client 1 to send the tensors of this recipe's model[.] Expected|{LARGE}"
FAR = "Sums of such updates can overflow"
FORM = f"Expected `.*` to be torch.float32 of shape .* but got|{NO_ARRAY}"

KINDS = {
    "samples: infinity": (saying(samples=float("inf")), WHOLE),
    "samples: not a number": (saying(samples=float("nan")), WHOLE),
    "samples: 2**63 - 1": (saying(samples=BIG), WHOLE),
    "samples: more than the client has": (saying(samples=10**4), WHOLE),
    "samples: negative": (saying(samples=-3), WHOLE),
    "samples: a float": (saying(samples=3.0), WHOLE),
    "samples: true": (saying(samples=True), WHOLE),
    "samples: text": (saying(samples="12"), WHOLE),
    "samples: 10,000 digits": (saying(samples="9" * 10_000), WHOLE),
    "samples: a list": (saying(samples=[12]), NESTED),
    "samples: missing": (without("samples"), WHOLE),
    "rehearsed: 2**63 - 1": (saying(rehearsed=BIG), TOO_MANY),
    "rehearsed: missing": (without("rehearsed"), TOO_MANY),
    "no head": (holding(head=None), RECORDS),
    "a head of arrays": (holding(head=ArrayRecord()), RECORDS),
    "an empty head": (holding(head=ConfigRecord()), OLD),
    "a header value of bytes": (saying(more=b"[" * 10_000), NESTED),
    "a header value of 100,000 brackets": (saying(nested="[" * 100_000), LONG),
    "a header value with a name of 100,000 letters": (saying(**{"z" * 100_000: 1}), LONG),
    "30,000 header values": (saying(**{str(number): number for number in range(30_000)}), LONG),
    "a code of 50 MB": (lambda m: replace(saying(refused="x" * 50_000_000)(m), arrays={}), LONG),
    "a code of 10,000 letters": (saying(refused="x" * 10_000), NO_CODE),
    "a code that is not printable": (saying(refused="\x1b[31m\n\u202e"), NO_CODE),
    "a text instead of a code": (saying(refused="Expected 3 labels but got 12."), NO_CODE),
    "a text instead of an argument": (saying(refused="invalid-value", argument="12 patients"), NO_CODE),
    "an unknown code": (saying(refused="z-z"), "got the error `z-z`. Read the log of the node"),
    "another client's name": (saying(client="2"), OLD),
    "another federation": (saying(federation="0" * 32), OLD),
    "another round": (saying(round=7), OLD),
    "a boolean round": (saying(round=False), OLD),
    "another message": (saying(message="0" * 32), OLD),
    "no message name": (without("message"), OLD),
    "an additional tensor": (more("more"), ENTRIES),
    "an additional tensor with a name of 100,000 letters": (more("z" * 100_000), ENTRIES),
    "a missing tensor": (less, ENTRIES),
    "no arrays": (holding(arrays=None), RECORDS),
    "additional arrays of 64 MB": (
        holding(more=ArrayRecord({"w": Array(FLOAT, (2**24,), "bytes", bytes(2**26))})),
        RECORDS,
    ),
    "additional text of 50 MB": (holding(more=ConfigRecord({"text": "x" * 50_000_000})), RECORDS),
    "metrics": (holding(more=MetricRecord({"loss": 0.5})), RECORDS),
    "1,000 records": (holding(**{str(number): ConfigRecord() for number in range(1000)}), RECORDS),
    "another encoding of arrays": (put(stype="numpy.ndarray"), FORM_OF_ARRAYS),
    "an encoding of 100,000 letters": (put(stype="z" * 100_000), FORM_OF_ARRAYS),
    "no bytes": (put(b""), NO_ARRAY),
    "a pickle": (put(b"\x80\x04K\x01."), NO_ARRAY),
    "a change mask without values": (put(b"\xff\xff"), NO_ARRAY),
    "a change mask with too few values": (put(lambda d: b"\xff\xff" + d[:-4]), NO_ARRAY),
    "an empty change mask with a value": (put(b"\0\0" + b"\0" * 4), NO_ARRAY),
    "too few bytes": (put(lambda d: d[:-4]), NO_ARRAY),
    "too many bytes": (put(lambda d: d + b"\0" * 4), NO_ARRAY),
    "a negative shape": (put(shape=(-1,)), FORM),
    "a shape of many ones": (put(shape=(1,) * 100 + (10,)), FORM),
    "an empty shape": (put(b"", shape=(0,)), FORM),
    "another shape of the same size": (put(shape=(10, 1)), r"to be torch.float32 of shape \(10,\), but"),
    "integers for floats": (put(dtype="torch.int32"), FORM),
    "objects": (put(dtype="object"), FORM),
    "a type that is another name in torch": (put(dtype="torch.save"), FORM),
    "a type of 10,000 letters": (put(dtype="z" * 10_000), FORM),
    "a message of 4 MB": (put(lambda d: d + b"\0" * 4_000_000), LARGE),
    "weights of 3e38": (numbers(lambda v: np.full_like(v, 3e38)), FAR),
    "weights of 1e19": (numbers(lambda v: np.full_like(v, 1e19)), f"{FAR}|times the larger of 1 and the norm"),
    "an update of a million times the usual": (
        numbers(lambda v: v * 1e6),
        "Expected the norm of an update of client 1 to be at most 1000 times the larger of 1 and the norm of the",
    ),
}
"""Invalid answers to a download.

Each item has a function that changes an honest answer, and a pattern of the error message.
"""

HELLOS = {
    "no head": (holding(head=None), RECORDS),
    "a header value of 100,000 letters": (saying(more="[" * 100_000), LONG),
    "a header value of bytes": (saying(more=b"[" * 10_000), NESTED),
    "a name of two dots": (saying(client=".."), "Expected the name of a client"),
    "no name": (saying(client=""), "Expected the name of a client"),
    "a name that is a number": (saying(client=7), "Expected the name of a client"),
    "a name that is too long for a file": (saying(client="x" * 300), "Expected the name of a client"),
    "a name that is too long after percent-encoding": (saying(client="\u4e2d" * 100), "Expected the name of a client"),
    "half of a surrogate pair": (saying(client="\ud800"), "Expected the name of a client"),
    "a name that is not printable": (saying(client="1\x1b[2J"), "Expected the name of a client"),
    "a name that looks like another one": (saying(client="\uff11"), "Expected the name of a client.*NFKC"),
    "a name that is there": (saying(client="0"), "Expected one node for each client, but got two for 0"),
    "another version": (saying(client="9", version="0.0.9"), "Expected client 9 to run lightning-fcl"),
    "a version of 10,000 letters": (saying(client="9", version="9" * 10_000), "Expected client 9 to run .* 9{300}"),
    "another recipe": (saying(client="9", recipe="0"), "Expected client 9 to have the recipe"),
    "infinite samples": (saying(samples=float("inf")), "Expected `samples`"),
    "samples: 2**40": (saying(client="9", samples=2**40), "Expected `samples` to be a whole number"),
    "no samples": (without("samples"), "Expected `samples`"),
    "an array": (more("w"), "Expected at most 0 bytes of arrays from a node, but got 4"),
    "a code of 10,000 letters": (saying(refused="x" * 10_000), NO_CODE),
    "a name of no client of the run": (
        saying(client="9"),
        "Expected node .* to be one of the clients 0, 1, 2 of the",
    ),
    "metrics": (holding(more=MetricRecord({"loss": 0.5})), RECORDS),
}
"""Invalid answers to the first message, which asks the node for its client.

Each item has a function that changes an honest answer, and a pattern of the error message.
"""
