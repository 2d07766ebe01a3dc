from .suite import classes_of as classes_of
from .suite import statements_of as statements_of
from .suite import try_statements as try_statements
from .trial import NotTriedError as NotTriedError
from .trial import Statement as Statement
