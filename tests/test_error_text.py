"""Static check that only lightning_fcl/library_errors.py makes decisions by the text of errors (see error_text.py)."""

import importlib.util
import sys
from pathlib import Path
from textwrap import indent

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("lightning_fcl", "zoo", "recipes", "benchmarks")

SPEC = importlib.util.spec_from_file_location("error_text", Path(__file__).with_name("error_text.py"))
# Register the module, because its dataclasses look it up by name.
error_text = sys.modules["error_text"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(error_text)


def handler(body, before="", after=""):
    """Return the source of a module with an `except` clause.

    Args:
        body: Body of the `except` clause.
        before: Source before the function with the clause.
        after: Rest of the function after the clause.
    """
    clause = f"try:\n    work()\nexcept ValueError as error:\n{indent(body, '    ')}\n"
    return (
        f"import re\nimport sys\nimport traceback\n{before}\ndef call(log, known):\n{indent(clause + after, '    ')}\n"
    )


REJECTED = {
    # Texts
    "str": handler("return 'full' in str(error)"),
    "repr": handler("return repr(error) == 'ValueError()'"),
    "f_string": handler("return f'{error}' != ''"),
    "f_string_conversion": handler("return 'full' in f'got {error!r}'"),
    "format": handler("return format(error) < 'm'"),
    "format_method": handler("return 'full' in '{}'.format(error)"),
    "percent": handler("return 'full' in '%s' % error"),
    "dunder_str": handler("return 'full' not in error.__str__()"),
    "args": handler("return error.args == ('full',)"),
    "first_arg": handler("return error.args[0] == 'full'"),
    "notes": handler("return [note for note in error.__notes__ if note.endswith('!')]"),
    "getattr_notes": handler("return any('full' in note for note in getattr(error, '__notes__', []))"),
    "hint": handler("return error.hint == 'Retry.'"),
    "traceback": handler("return 'worker' in ''.join(traceback.format_exception(error))"),
    "format_exc": handler("return 'worker' in traceback.format_exc()"),
    # Errors
    "cause": handler("return 'full' in str(error.__cause__)"),
    "context_args": handler("return error.__context__.args[0].startswith('full')"),
    "exc_info": "import sys\ndef call():\n    return 'full' in str(sys.exc_info()[1])\n",
    "annotation": "def call(error: OSError | None):\n    return 'full' in str(error)\n",
    "string_annotation": "def call(error: 'yaml.YAMLError'):\n    return 'full' in str(error)\n",
    "container_annotation": "def call(errors: list[Exception]):\n    return 'full' in str(errors[0])\n",
    "isinstance": "def call(found):\n    return isinstance(found, OSError) and 'full' in str(found)\n",
    "if_isinstance": "def call(found):\n    if isinstance(found, OSError):\n        return 'full' in str(found)\n",
    "not_isinstance": "def call(found):\n    if not isinstance(found, OSError):\n        return\n"
    "    return 'full' in str(found)\n",
    "filtered": "def call(found):\n    return [one for one in found if isinstance(one, OSError) and 'x' in str(one)]\n",
    "matched": "def call(found):\n    match found:\n        case OSError() as one: return str(one) < 'a'\n",
    "made": "def call():\n    error = ValueError('full')\n    return str(error) == 'full'\n",
    "own_class": "class Ended(OSError): ...\ndef call(error: Ended):\n    return str(error) == ''\n",
    "method_of_error": "class OwnError(ValueError):\n    def is_full(self):\n        return 'full' in str(self)\n",
    "group": "def call():\n    try: work()\n    except* OSError as group:\n"
    "        return str(group.exceptions[0]) == ''\n",
    # Decisions
    "startswith": handler("return str(error).startswith('full')"),
    "endswith": handler("return str(error).lower().endswith(('full', 'quota'))"),
    "unbound_method": handler("return str.startswith(str(error), 'full')"),
    "split": handler("return ' '.join(str(error).split())"),
    "rsplit": handler("return str(error).rsplit(':', 1)[-1]"),
    "partition": handler("first, _, rest = str(error).partition(':')"),
    "rpartition": handler("return str(error).rpartition(':')[2]"),
    "splitlines": handler("return str(error).strip().splitlines()[0]"),
    "find": handler("return str(error).find('full') >= 0"),
    "index": handler("return str(error).index('full')"),
    "count": handler("return str(error).count('full')"),
    "removeprefix": handler("return str(error).removeprefix('Error: ')"),
    "removesuffix": handler("return str(error).removesuffix('.')"),
    "replace": handler("return str(error).replace('a', 'b')"),
    "re_search": handler("return re.search('full', str(error))"),
    "re_sub": handler("return re.sub('<.*>', '', str(error))"),
    "imported_re": "from re import search\n" + handler("return search('full', str(error))"),
    "pattern": handler("return FULL.fullmatch(str(error))", before="FULL = re.compile('full')"),
    "pattern_table": handler(
        "return next((name for one, name in TABLE.items() if one.search(str(error))), '')",
        before="TABLE = {re.compile('full'): 'disk'}",
    ),
    "finditer": handler("return [*re.compile('full').finditer(str(error))]"),
    "match": handler("match str(error):\n    case 'full':\n        return 1"),
    "match_args": handler("match error:\n    case ValueError(args=('full',)):\n        return 1"),
    "subscript": handler("return str(error)[:4] == 'full'"),
    "look_up": handler("return REMEDIES[str(error)]", before="REMEDIES = {'full': 'Make room.'}"),
    "look_up_get": handler("return REMEDIES.get(str(error), '')", before="REMEDIES = {'full': 'Make room.'}"),
    "close_match": handler("return difflib.get_close_matches(str(error), known)"),
    "assert": handler("assert 'full' in str(error)"),
    "table_of_ours": handler("return 'full' in first_line(error)")
    + "def first_line(error: BaseException) -> str:\n    return str(error)\n",
    # Data flow in a function
    "name": handler("text = str(error)\nif 'full' in text:\n    raise"),
    "name_after_clause": handler("why = f'{error}'", after="return why == 'full'"),
    "error_after_clause": handler("last = error", after="return str(last) == 'full'"),
    "unpacking": handler("kind, text = type(error), str(error)\nreturn text == 'full'"),
    "walrus": handler("if (text := str(error)) and text[0] == 'f':\n    raise"),
    "augmented": handler("text = 'got '\ntext += str(error)\nreturn text == 'got full'"),
    "string_methods": handler("return str(error).strip().lower() == 'full'"),
    "concatenation": handler("return 'got ' + str(error) == 'got full'"),
    "join": handler("return ', '.join([str(error), 'more']) == 'full, more'"),
    "list": handler("reasons = []\nreasons.append(str(error))\nreturn reasons[0] == 'full'"),
    "dict": handler("found = {}\nfound['why'] = str(error)\nreturn found['why'] == 'full'"),
    "list_of_errors": handler("errors = [error]\nreturn [one for one in errors if str(one) == 'full']"),
    "map": handler("return 'full' in list(map(str, [error]))"),
    "conditional": handler("text = str(error) if known else ''\nreturn text == 'full'"),
    "attribute": handler("log.why = str(error)\nreturn log.why == 'full'"),
    "attribute_of_made": handler("one = Fault(error.args)\nreturn one.why == 'full'") + "class Fault: ...\n",
    "self": "class Node:\n    def run(self, error: OSError):\n        self.why = str(error)\n"
    "    def check(self):\n        return self.why == 'full'\n",
    "unknown_function": handler("return shorten(str(error), 10) == 'full'"),
    "loop": handler("for word in [str(error)]:\n    if word == 'full':\n        raise"),
    "closure": handler("def is_full():\n    return 'full' in str(error)\nreturn is_full()"),
    "lambda_closure": handler("return any(map(lambda one: one in str(error), known))"),
    "nonlocal": "def call():\n    why = ''\n    def run(error: OSError):\n        nonlocal why\n"
    "        why = str(error)\n    return why == 'full'\n",
    "global": "why = ''\ndef run(error: OSError):\n    global why\n    why = str(error)\n"
    "def call():\n    return why == 'full'\n",
    # Helpers
    "helper": handler("return is_full(error)") + "def is_full(one):\n    return 'full' in str(one)\n",
    "helper_of_text": handler("return is_full(str(error))") + "def is_full(text):\n    return 'full' in text\n",
    "keyword": handler("return is_full(text=str(error))") + "def is_full(*, text):\n    return 'full' in text\n",
    "star": handler("return is_full(str(error))") + "def is_full(*texts):\n    return 'full' in texts[0]\n",
    "lambda": handler("return is_full(error)", before="is_full = lambda one: 'full' in str(one)"),
    "static_method": handler("return Kinds.is_full(error)")
    + "class Kinds:\n    @staticmethod\n    def is_full(one):\n        return 'full' in str(one)\n",
    "method": handler("return known.is_full(error)")
    + "class Kinds:\n    def is_full(self, one):\n        return 'full' in str(one)\n",
    "constructor": handler("return Kind(str(error))")
    + "class Kind:\n    def __init__(self, text):\n        self.is_full = 'full' in text\n",
    "returned": handler("return text_of(error) == 'full'") + "def text_of(one):\n    return str(one).strip()\n",
    "returned_part": handler("kind, text = parts(error)\nreturn text == 'full'")
    + "def parts(one):\n    return type(one), str(one)\n",
    "returned_by_generator": handler("return 'full' in texts(error)") + "def texts(one):\n    yield str(one)\n",
    "returned_cause": handler("return str(root(error)) == 'full'")
    + "def root(one):\n    return root(one.__cause__) if one.__cause__ else one\n",
    "two_helpers": handler("return is_full(error)")
    + "def is_full(one):\n    return has(str(one), 'full')\ndef has(text, word):\n    return word in text\n",
    "three_helpers": handler("return first(error)")
    + "def first(a):\n    return second(a)\ndef second(b):\n    return third(f'{b}')\n"
    "def third(c):\n    return c == 'full'\n",
    "two_returned": handler("return outer(error) == 'full'")
    + "def outer(one):\n    return inner(one)\ndef inner(one):\n    return str(one)\n",
    "function_as_argument": handler("return any(map(is_full, [str(error)]))")
    + "def is_full(text):\n    return 'full' in text\n",
    "partial": handler("return partial(is_full, error)()") + "def is_full(one):\n    return 'full' in str(one)\n",
}

ALLOWED = {
    "raised": handler("raise KeyError(f'Expected room but got: {error}.') from error"),
    "logged": handler("log.warning('Dropped: %s', error)\nlog.error(str(error))"),
    "printed": handler("print(str(error).rstrip('.'), repr(error), error.args)"),
    "returned": handler("return {'refused': str(error)}"),
    "shortened": handler("text = str(error)\nreturn text if len(text) <= 500 else f'{text[:497]}...'"),
    "truth": handler("text = str(error)\nreturn text or type(error).__name__"),
    "none": handler("text = str(error) if known else None\nreturn text is None"),
    "class": handler("return isinstance(error, OSError) and type(error) is not OSError"),
    "name_of_class": handler("return type(error).__name__ == 'Ended'"),
    "match_class": handler("match error:\n    case OSError() | KeyError():\n        return 1"),
    "match_code": handler("match error:\n    case OwnError(code='no-room'):\n        return 1"),
    "code": handler("return error.code == 'no-room' or error.argument in ('x', 'y')"),
    "errno": handler("return error.errno in (28, 122)"),
    "value": handler("return error.value is None"),
    "identity": handler("return error is known or error == known or error in known"),
    "cause_class": handler("return isinstance(error.__cause__, OSError)"),
    "other_text": handler("text = str(known)\nreturn text == 'full' or text.split()"),
    "other_args": "def call(node):\n    return node.args[0] == 'full'\n",
    "other_branch": "def call(found):\n    if isinstance(found, OSError):\n        return f'{found}'\n"
    "    return str(found) == 'full'\n",
    "class_annotation": "def call(kind: type[ValueError]):\n    return str(kind) == 'full'\n",
    "name_of_other_scope": handler("log.info(error)") + "def other(error):\n    return str(error) == 'full'\n",
    "helper_that_displays": handler("return one_line(error)") + "def one_line(one):\n    return f'{one}'.rstrip('.')\n",
    "helper_with_other_argument": handler("return check(error, 'x')")
    + "def check(one, name):\n    return f'{one} {name == known}'\n",
    "helper_called_twice": handler("return listed([str(error)]), listed([known]) == ''")
    + "def listed(names):\n    return ', '.join(names)\n",
    "table": handler("return match_error(error, LibraryError.DEVICES) is None"),
    "group_of_table": handler("found = match_error(error, LibraryError.DEVICES)\nreturn found['name'] == 'x'"),
    "enum_named_error": "class KindError(Enum):\n    X = 1\ndef call(kind: KindError):\n    return str(kind) == 'X'\n",
    "kept": handler("reasons = {}\nreasons['x'] = str(error)\nlog.info('%s', reasons)"),
    "template": handler("return 'Got {why}.'.replace('{why}', str(error))"),
}


@pytest.mark.parametrize("source", REJECTED.values(), ids=REJECTED)
def test_decision_by_error_text_is_found(source):
    assert error_text.find_decisions({"lightning_fcl/sample.py": source})


@pytest.mark.parametrize("source", ALLOWED.values(), ids=ALLOWED)
def test_other_uses_of_errors_are_allowed(source):
    assert error_text.find_decisions({"lightning_fcl/sample.py": source}) == []


@pytest.mark.parametrize(
    ("line", "call"),
    [
        ("from lightning_fcl.kinds import is_full", "is_full(error)"),
        ("from lightning_fcl.kinds import is_full as full", "full(error)"),
        ("from lightning_fcl import kinds", "kinds.is_full(error)"),
        ("import lightning_fcl.kinds", "lightning_fcl.kinds.is_full(error)"),
        ("from lightning_fcl import is_full", "is_full(error)"),
    ],
)
def test_helper_in_another_module_is_found_with_its_line(line, call):
    sources = {
        "lightning_fcl/__init__.py": "from lightning_fcl.kinds import is_full\n",
        "lightning_fcl/kinds.py": "def is_full(one):\n    return 'full' in str(one)\n",
        "lightning_fcl/sample.py": handler(f"return {call}", before=line),
    }
    (found,) = map(str, error_text.find_decisions(sources))
    assert found.startswith("lightning_fcl/kinds.py:2: comparison with the text of an error (called from")
    assert found.endswith("lightning_fcl/sample.py:9)")


def test_library_errors_table_may_compare_texts():
    source = "import re\ndef match_error(error: BaseException, kind):\n    return re.search(kind.value, str(error))\n"
    assert error_text.find_decisions({error_text.TABLE: source}) == []
    assert error_text.find_decisions({"lightning_fcl/other.py": source})


@pytest.mark.seconds
def test_package_makes_no_decision_by_error_text():
    sources = dict(error_text.python_files(ROOT, *FOLDERS))
    assert len(sources) > 250 and error_text.TABLE in sources
    found = error_text.find_decisions(sources)
    assert not found, "\n" + "\n".join(map(str, found))
