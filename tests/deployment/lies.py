"""What a client may send in place of an honest answer, each with what its refusal says."""

import io
import json
from dataclasses import dataclass, field, replace

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from lightning_fcl.deployment.link import record_of

BIG = 2**63


@dataclass(frozen=True)
class Message:
    """An answer as it goes over the wire, all of which can be another."""

    head: dict
    types: dict
    arrays: dict
    text: object = None
    others: dict = field(default_factory=dict)

    @classmethod
    def of(cls, parcel):
        return cls.of_record(record_of(parcel))

    @classmethod
    def of_record(cls, record):
        said = json.loads(record.config_records["parcel"]["text"])
        arrays = record.array_records["arrays"]
        return cls(said["head"], said["types"], {name: array.data for name, array in arrays.items()})

    def record(self):
        """As Flower sends it."""
        text = json.dumps({"head": self.head, "types": self.types}) if self.text is None else self.text
        arrays = {
            name: Array(dtype="float32", shape=(1,), stype="numpy.ndarray", data=data)
            for name, data in self.arrays.items()
        }
        return RecordDict({"parcel": ConfigRecord({"text": text}), "arrays": ArrayRecord(arrays), **self.others})


def saying(**words):
    """With other words in its head."""
    return lambda message: replace(message, head={**message.head, **words})


def without(*words):
    return lambda message: replace(message, head={n: v for n, v in message.head.items() if n not in words})


def text(written):
    """With another text."""
    return lambda message: replace(message, text=written)


def spelt(word, number):
    """With a number that no program of ours would write."""

    def change(message):
        honest = json.dumps({"head": {**message.head, word: "HERE"}, "types": message.types})
        return replace(message, text=honest.replace('"HERE"', number))

    return change


def first(message):
    """The name of the smallest array of 32-bit floating-point numbers."""
    names = [name for name, dtype in message.types.items() if dtype == "float32"]
    return min(names, key=lambda name: len(message.arrays[name]))


def put(data, dtype=None):
    """With other bytes of the first array: data, or what a function makes of them."""

    def change(message):
        name = first(message)
        made = data(message.arrays[name]) if callable(data) else data
        types = message.types if dtype is None else {**message.types, name: dtype}
        return replace(message, types=types, arrays={**message.arrays, name: made})

    return change


def swap(old, new):
    """With other bytes in the header of the first array, which stays as long as it says."""

    def changed(data):
        length = int.from_bytes(data[8:10], "little")
        header, rest = data[10 : 10 + length].rstrip(), data[10 + length :]
        made = header.replace(old, new, 1)
        assert made != header
        return data[:8] + len(made + b"\n").to_bytes(2, "little") + made + b"\n" + rest

    return put(changed)


def shaped(new):
    """With another shape in the header of the first array."""

    def changed(data):
        begin = data.index(b"'shape': (")
        end = data.index(b")", begin)
        made = data[10:begin] + b"'shape': " + new + data[end + 1 : 10 + int.from_bytes(data[8:10], "little")]
        return data[:8] + len(made).to_bytes(2, "little") + made + data[10 + int.from_bytes(data[8:10], "little") :]

    return put(changed)


def numbers(make):
    """With other numbers in each array of 32-bit floating-point numbers, made of the honest ones."""

    def change(message):
        arrays = dict(message.arrays)
        for name, dtype in message.types.items():
            if dtype == "float32":
                data = arrays[name]
                begins = 10 + int.from_bytes(data[8:10], "little")
                with np.errstate(over="ignore"):
                    made = make(np.frombuffer(data, np.float32, offset=begins)).astype(np.float32)
                arrays[name] = data[:begins] + made.tobytes()
        return replace(message, arrays=arrays)

    return change


def as_array(array, dtype=None):
    """With the array of another type as the first."""

    def made(data):
        begins = 10 + int.from_bytes(data[8:10], "little")
        return _saved(np.frombuffer(data, np.float32, offset=begins).astype(array))

    return put(made, dtype)


def _saved(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def more(name, dtype="float32"):
    """With an entry more."""
    return lambda message: replace(
        message,
        types={**message.types, name: dtype},
        arrays={**message.arrays, name: _saved(np.zeros(1, np.dtype(dtype)))},
    )


def less(message):
    """Without its first array."""
    name = first(message)
    types, arrays = ({n: v for n, v in all_.items() if n != name} for all_ in (message.types, message.arrays))
    return replace(message, types=types, arrays=arrays)


def both(message):
    """With its first array also in the other form."""
    plain, bar, _ = first(message).partition("|")
    return more(plain if bar else f"{plain}|values")(message)


def unnamed(message):
    """Without the type of its first array."""
    return replace(message, types={n: v for n, v in message.types.items() if n != first(message)})


WHOLE = "Expected `samples` to be a whole number from 0 to [0-9]+ but got"
TOO_MANY = "Expected `rehearsed` to be a whole number from 0 to [0-9]+ but got"
NO_MESSAGE = "Expected a message of lightning-fcl but got"
DEEP = "Expected at most 16 brackets within each other but got more"
LONG = "Expected a text of at most [0-9]+ characters but got"
NO_ARRAY = "Expected `.*` to be an array of numbers"
OLD = "it is old, or another's"
ENTRIES = "Expected client 1 to send the 4 entries of this recipe's model but"
LARGE = "Expected at most [0-9]+ bytes of client 1 but got"
FAR = "with which sums overflow"
TYPE = "Expected `.*` of client 1 to be torch.float32 but got torch."

KINDS = {
    "samples: infinity": (spelt("samples", "Infinity"), WHOLE),
    "samples: minus infinity": (spelt("samples", "-Infinity"), WHOLE),
    "samples: no number": (spelt("samples", "NaN"), WHOLE),
    "samples: 400 digits": (saying(samples=10**400), WHOLE),
    "samples: 10,000 digits": (spelt("samples", "9" * 10_000), NO_MESSAGE),
    "samples: 1e300": (spelt("samples", "1e300"), WHOLE),
    "samples: 1e400": (spelt("samples", "1e400"), WHOLE),
    "samples: 2**63": (saying(samples=BIG), WHOLE),
    "samples: 10**15": (saying(samples=10**15), WHOLE),
    "samples: ten times its own": (saying(samples=10**4), WHOLE),
    "samples: negative": (saying(samples=-3), WHOLE),
    "samples: half": (saying(samples=2.5), WHOLE),
    "samples: a float": (saying(samples=3.0), WHOLE),
    "samples: true": (saying(samples=True), WHOLE),
    "samples: null": (saying(samples=None), WHOLE),
    "samples: text": (saying(samples="12"), WHOLE),
    "samples: a list": (saying(samples=[12]), WHOLE),
    "samples: none": (without("samples"), WHOLE),
    "rehearsed: infinity": (spelt("rehearsed", "Infinity"), TOO_MANY),
    "rehearsed: 300 digits": (saying(rehearsed=10**300), TOO_MANY),
    "rehearsed: 2**63": (saying(rehearsed=BIG), TOO_MANY),
    "rehearsed: negative": (saying(rehearsed=-1), TOO_MANY),
    "rehearsed: none": (without("rehearsed"), TOO_MANY),
    "text: 100,000 brackets": (text("[" * 100_000), LONG),
    "text: 10,000 brackets": (text("[" * 10_000), DEEP),
    "text: 5,000 braces in braces": (text('{"a":' * 3_000 + "1" + "}" * 3_000), DEEP),
    "text: brackets behind an open quote": (text('"' + "[" * 10_000), NO_MESSAGE),
    "text: escaped quotes without end": (text('"' + '\\"' * 5_000), NO_MESSAGE),
    "text: empty": (text(""), NO_MESSAGE),
    "text: a list": (text("[]"), NO_MESSAGE),
    "text: a number": (text("1"), NO_MESSAGE),
    "text: head and types are lists": (text('{"head": [], "types": []}'), NO_MESSAGE),
    "text: no head": (text('{"types": {}}'), NO_MESSAGE),
    "text: cut short": (lambda m: text(json.dumps({"head": m.head, "types": m.types})[:-5])(m), NO_MESSAGE),
    "text: bytes": (text(b"{}"), "another app's"),
    "text: a float": (text(1.5), "another app's"),
    "text: several": (text(["a", "b"]), "another app's"),
    "a reason of 50 MB": (lambda m: replace(saying(refused="x" * 50_000_000)(m), types={}, arrays={}), LONG),
    "a reason of 10,000 letters": (saying(refused="x" * 10_000), "x{400}"),
    "a reason of half a letter": (saying(refused="\ud800 \x1b[31m\n\u202e"), r"^ +\[31m +$"),
    "a reason that is a list": (saying(refused=[1, [2]]), r"\[1, \[2\]\]"),
    "another client's name": (saying(client="2"), OLD),
    "no client's name": (without("client"), OLD),
    "another federation": (saying(federation="0" * 32), OLD),
    "another round": (saying(round=7), OLD),
    "a round that is true": (saying(round=False), OLD),
    "another message": (saying(message="0" * 32), OLD),
    "no message": (without("message"), OLD),
    "an entry more": (more("more"), ENTRIES),
    "what has changed of nothing": (more("zz|values"), ENTRIES),
    "an entry of 100,000 letters": (more("z" * 100_000), LONG),
    "an entry whole and in parts": (both, ENTRIES),
    "an entry less": (less, ENTRIES),
    "an array that has no type": (unnamed, "Expected the arrays"),
    "types of other arrays": (lambda m: replace(m, types={**m.types, "other": "float32"}), "Expected the arrays"),
    "a header that is (": (put(b"\x93NUMPY\x01\x00\x02\x00(\n"), NO_ARRAY),
    "a header of minus signs": (put(b"\x93NUMPY\x01\x00\xff\xff" + b"-" * 65_535), LARGE),
    "a header of parentheses": (put(b"\x93NUMPY\x01\x00\xe0\x00" + b"(" * 224), NO_ARRAY),
    "a header that calls": (swap(b"False", b"print(1)"), NO_ARRAY),
    "a header of version 2": (put(lambda d: d[:6] + b"\x02" + d[7:]), NO_ARRAY),
    "a header longer than all": (put(lambda d: d[:8] + b"\xff\xff" + d[10:]), NO_ARRAY),
    "no header": (put(b""), NO_ARRAY),
    "a pickle": (put(lambda d: b"\x80\x04K\x01."), NO_ARRAY),
    "a zip file": (put(lambda d: b"PK\x03\x04" + d), NO_ARRAY),
    "a shape that is true": (shaped(b"(True,)"), NO_ARRAY),
    "a negative shape": (shaped(b"(-1,)"), NO_ARRAY),
    "a shape of 40 digits": (shaped(b"(" + b"9" * 40 + b",)"), NO_ARRAY),
    "a shape beyond its bytes": (shaped(b"(999999999999999,)"), NO_ARRAY),
    "a shape of many ones": (shaped(b"(" + b"1, " * 100 + b"1)"), NO_ARRAY),
    "a shape of nothing": (shaped(b"(0,)"), NO_ARRAY),
    "another shape of as many numbers": (shaped(b"(10, 1)"), r"of client 1 to be torch.float32 of shape \(10,\) but"),
    "by columns": (swap(b"False", b"True"), NO_ARRAY),
    "another byte order": (swap(b"'<f4'", b"'>f4'"), NO_ARRAY),
    "integers for floats": (swap(b"'<f4'", b"'<i4'"), NO_ARRAY),
    "objects": (swap(b"'<f4'", b"'|O8'"), NO_ARRAY),
    "a structure": (swap(b"'<f4'", b"[('a', '<f4')]"), NO_ARRAY),
    "longdouble": (as_array(np.longdouble, "float128"), TYPE),
    "complex longdouble": (as_array(np.clongdouble, "complex256"), TYPE),
    "double": (as_array(np.float64, "float64"), TYPE),
    "half": (as_array(np.float16, "float16"), TYPE),
    "a type that is a list": (put(lambda d: d, [1]), TYPE),
    "a type that is a name of torch": (put(lambda d: d, "save"), TYPE),
    "cut short": (put(lambda d: d[:-4]), NO_ARRAY),
    "longer than it says": (put(lambda d: d + b"\0" * 4), NO_ARRAY),
    "a message of 4 MB": (put(lambda d: d + b"\0" * 4_000_000), LARGE),
    "weights of 3e38": (numbers(lambda v: np.full_like(v, 3e38)), FAR),
    "weights of -3e38": (numbers(lambda v: np.full_like(v, -3e38)), FAR),
    "weights of 1e19": (numbers(lambda v: np.full_like(v, 1e19)), f"{FAR}|times the larger of the server's norm and 1"),
    "an update of a million times the usual": (
        numbers(lambda v: v * 1e6),
        "Expected an update of client 1 of at most 1000 times the larger of the server's norm and 1",
    ),
}
"""Of an answer to a download: what is done to it, and what its refusal says."""

HELLOS = {
    "100,000 brackets": (text("[" * 100_000), LONG),
    "10,000 brackets": (text("[" * 10_000), DEEP),
    "nothing": (text(""), NO_MESSAGE),
    "bytes": (text(b""), "another app's"),
    "a name of two dots": (saying(client=".."), "Expected the name of a client"),
    "a name of a dot": (saying(client="."), "Expected the name of a client"),
    "no name": (saying(client=""), "Expected the name of a client"),
    "a name that is a number": (saying(client=7), "Expected the name of a client"),
    "a name longer than a file's": (saying(client="x" * 300), "Expected the name of a client"),
    "a name of 100 letters that are long for a file": (saying(client="\u4e2d" * 100), "Expected the name of a client"),
    "half a letter": (saying(client="\ud800"), "Expected the name of a client"),
    "a name that is not printed": (saying(client="1\x1b[2J"), "Expected the name of a client"),
    "a name that may be taken for another": (saying(client="\uff11"), "Expected the name of a client.*NFKC"),
    "a name that is there": (saying(client="0"), "Expected one node for each client but got two for 0"),
    "another version": (saying(client="9", version="0.0.9"), "Expected client 9 to run lightning-fcl"),
    "a version of 10,000 letters": (saying(client="9", version="9" * 10_000), "Expected client 9 to run .* 9{300}"),
    "another recipe": (saying(client="9", recipe="0"), "Expected client 9 to have the recipe"),
    "samples without end": (spelt("samples", "Infinity"), "Expected `samples`"),
    "more samples than anybody has": (saying(client="9", samples=2**40), "Expected `samples` to be a whole number"),
    "no samples": (without("samples"), "Expected `samples`"),
    "an array": (more("w"), "Expected an answer to hello without arrays but got `w`"),
    "a reason of 10,000 letters": (saying(refused="x" * 10_000), "x{400}"),
}
"""Of an answer to hello."""
