from .run_data import Run as Run
from .run_data import read_run as read_run
from .run_data import read_runs as read_runs
