from .fixtures import NotApplicableError as NotApplicableError
from .fixtures import Statement as Statement
from .suite import get_classes as get_classes
from .suite import get_statements as get_statements
from .suite import run_statements as run_statements
