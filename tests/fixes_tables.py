"""Rows of all tables of hints by name, and the names or functions of slow rows (at least 0.5 s)."""

import fixes
import fixes_callbacks
import fixes_columns
import fixes_commands
import fixes_data
import fixes_datasets
import fixes_deployment
import fixes_federation
import fixes_files
import fixes_hooks
import fixes_methods
import fixes_models
import fixes_privacy
import fixes_processes
import fixes_training

TABLES = (
    fixes,
    fixes_callbacks,
    fixes_columns,
    fixes_data,
    fixes_datasets,
    fixes_federation,
    fixes_hooks,
    fixes_methods,
    fixes_models,
    fixes_privacy,
    fixes_processes,
    fixes_training,
)
ROWS = {name: row for table in TABLES for name, row in table.ROWS.items()}
SECONDS = set().union(*(table.SECONDS for table in TABLES))

# Tables of files, commands and deployments. Their rows use other fixtures than the rows of `TABLES`.
FILE_TABLES = (fixes_files, fixes_commands, fixes_deployment)
FILE_ROWS = {name: row for table in FILE_TABLES for name, row in table.ROWS.items()}
FILE_SECONDS = set().union(*(table.SECONDS for table in FILE_TABLES))
