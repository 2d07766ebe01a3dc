"""Tests that each hint of an error has a row in the tables of fixes, another test, or a listed reason for no test."""

import re
from collections import defaultdict
from pathlib import Path

import pytest
from fixes_tables import FILE_ROWS, ROWS
from hint_texts import HOLE, Package, read_package

ROOT = Path(__file__).parents[1]

# Tests that raise an error and try its fix. These tests use fixtures that rows do not have. Keys are parts of hints.
TRIED_ELSEWHERE: dict[str, list[str]] = {
    "Use a name such as ": [
        "tests/cli/test_new.py::test_derive_names_unusable_name_raises_with_usable_name",
        "tests/cli/test_new.py::test_new_name_of_installed_module_raises",
    ],
    "Use table.json and samples.json of the same command `lightning-fcl leaderboard`.": [
        "tests/evaluation/test_comparison_results.py::"
        "test_compare_rows_samples_of_other_runs_raise_and_own_samples_work",
    ],
    "Delete the file, and run `lightning-fcl leaderboard --commit-runs`.": [
        "tests/cli/test_leaderboard.py::test_leaderboard_runs_with_other_keys_are_fixed_by_deleting_them",
        "tests/cli/test_leaderboard.py::test_leaderboard_runs_without_json_are_fixed_by_deleting_them",
        "tests/cli/test_leaderboard.py::test_leaderboard_runs_of_another_format_are_fixed_by_deleting_them",
        # A missing file is no error.
        "tests/cli/test_leaderboard.py::test_leaderboard_committed_runs_are_reused_until_their_recipe_changes",
    ],
    "Write the file with `lightning-fcl leaderboard`.": [
        "tests/evaluation/test_comparison_results.py::test_damaged_comparisons_are_fixed_by_writing_them_again",
        "tests/evaluation/test_comparison_results.py::test_damaged_samples_are_fixed_by_writing_them_again",
        "tests/evaluation/test_comparison_results.py::test_missing_comparisons_are_fixed_by_writing_them",
        "tests/evaluation/test_comparison_results.py::"
        "test_comparisons_of_another_format_are_fixed_by_writing_them_again",
        "tests/evaluation/test_comparison_results.py::test_samples_of_another_format_are_fixed_by_writing_them_again",
    ],
    "Write {PROTOCOL | METHOD | COLUMN}, or {= ": [
        "tests/evaluation/test_findings.py::test_render_findings_hints_are_fixes_that_work",
    ],
    "Exchange the methods, and correct the words. To show the sign, write + after the column.": [
        "tests/evaluation/test_findings.py::test_render_findings_hints_are_fixes_that_work",
    ],
    "Use another NAME, or another `--out`.": [
        "tests/cli/test_new.py::test_new_existing_file_is_avoided_with_other_name_or_folder",
    ],
    "Create the folder with `mkdir -p ": [
        "tests/cli/test_new.py::test_new_missing_out_is_created_with_command_in_hint",
    ],
    "such as `--out table.txt`.": ["tests/cli/test_sweep.py::test_out_that_is_a_folder_or_a_file_of_a_run_raises"],
    "Write an option of the recipe and its values": [
        "tests/cli/test_sweep.py::test_parse_grid_accepts_the_form_in_the_hint"
    ],
    "Free disk space, or use a folder on another disk with `--out`.": [
        "tests/cli/test_run_estimate.py::test_fit_with_full_disk_raises_before_training_and_other_folder_works",
    ],
    "Write `sampler: grid`, and a list of values for each setting of `space`.": [
        "tests/cli/test_leaderboard.py::test_leaderboard_search_with_random_sampler_raises",
    ],
    "Correct the cause, delete OUT, and run the same command again.": [
        "tests/cli/test_leaderboard.py::test_leaderboard_search_counts_failed_settings_and_raises_if_all_fail",
    ],
    "Delete the file, and run `lightning-fcl leaderboard --search`.": [
        "tests/cli/test_found_settings.py::test_read_settings_invalid_file_raises_with_fix",
    ],
    "Search them with `": [
        "tests/cli/test_found_settings.py::test_row_without_found_settings_raises_with_search_command",
        "tests/cli/test_leaderboard.py::test_leaderboard_search_of_one_case_makes_its_protocol_runnable",
    ],
    "Use another folder for `--out`.": [
        "tests/cli/test_new.py::test_new_out_that_is_a_file_is_avoided_with_other_folder",
    ],
    "Write a line for each row, as in `rows: {FedAvg: fedavg.yaml}`.": [
        "tests/cli/test_rows.py::test_check_rows_hint_is_a_fix_that_works",
    ],
    '" with quotation marks.': [
        "tests/cli/test_rows.py::test_check_rows_hint_is_a_fix_that_works",
    ],
    "Set `base`, or `configs` of the row.": [
        "tests/cli/test_rows.py::test_check_rows_hint_is_a_fix_that_works",
    ],
    "Write the name with quotation marks.": [
        "tests/cli/test_rows.py::test_check_rows_hint_is_a_fix_that_works",
    ],
    "Write their paths relative to the folder of this file.": [
        "tests/cli/test_rows.py::test_check_rows_hint_is_a_fix_that_works",
    ],
    "Rename a row. A row that is only a file has the name of the file: write `{configs: [FILE]}`.": [
        "tests/cli/test_rows.py::test_check_rows_hint_is_a_fix_that_works",
    ],
    "Write final_accuracy/server, final_accuracy/clients or final_accuracy/total.": [
        "tests/cli/test_rows.py::test_check_rows_hint_is_a_fix_that_works",
    ],
    "Remove the metric if there is no expected value.": [
        "tests/cli/test_rows.py::test_check_rows_hint_is_a_fix_that_works",
    ],
    "Write a name without a folder, as in `file: accuracy.png`.": [
        "tests/cli/test_rows.py::test_check_rows_hint_is_a_fix_that_works",
    ],
    "Write the rows of each panel, as in `panels: {Digits: {FedAvg: FedAvg}}`.": [
        "tests/cli/test_rows.py::test_check_rows_hint_is_a_fix_that_works",
    ],
    "Remove `experiences`.": [
        "tests/cli/test_rows.py::test_check_rows_hint_is_a_fix_that_works",
    ],
    "Write a panel for each row.": [
        "tests/cli/test_rows.py::test_check_rows_hint_is_a_fix_that_works",
    ],
    "Pass an existing file, or the name of a paper such as flwf.": [
        "tests/cli/test_rows.py::test_find_rows_hint_is_a_fix_that_works",
    ],
    "Pass a file, as in `lightning-fcl reproduce rows.yaml`.": [
        "tests/cli/test_rows.py::test_find_rows_hint_is_a_fix_that_works",
    ],
    "Use a file, as in `--storage sqlite:///study.db`.": [
        "tests/cli/test_tune_storage.py::test_open_storage_hint_is_a_fix_that_works",
    ],
    "Use a URL such as `sqlite:///study.db`, or a file such as `study.log` for a folder that machines share.": [
        "tests/cli/test_tune_storage.py::test_open_storage_hint_is_a_fix_that_works",
        "tests/cli/test_tune_storage.py::test_open_storage_invalid_text_raises",
        "tests/cli/test_tune_storage.py::test_open_storage_other_file_raises_and_keeps_the_file",
    ],
    "Did you mean FedCBDR?": [
        "tests/evaluation/test_comparison_results.py::test_read_comparisons_suggested_method_works",
    ],
    "Did you mean last_accuracy?": [
        "tests/evaluation/test_findings.py::test_render_findings_suggested_column_works",
    ],
    "Did you mean n_warmup_steps?": [
        "tests/cli/test_tune_pruning.py::test_make_pruner_suggested_argument_works",
    ],
    "Did you mean configs?": [
        "tests/cli/test_rows.py::test_check_rows_hint_is_a_fix_that_works",
    ],
    "Did you mean flwf?": [
        "tests/cli/test_rows.py::test_find_rows_prefers_paper_and_accepts_paths",
    ],
    "For an SQLite database, use `--storage sqlite:///": [
        "tests/cli/test_tune_storage.py::test_open_storage_hint_is_a_fix_that_works",
    ],
    "and the folder of an SQLite file must exist. Then run the same": [
        "tests/cli/test_tune_storage.py::test_open_storage_hint_is_a_fix_that_works",
    ],
    "Install the package of the SQLAlchemy driver": [
        "tests/cli/test_tune_storage.py::test_open_storage_missing_driver_raises",
    ],
    "Use another name with `--study-name`, or delete the study and its trials with `--restart`.": [
        "tests/cli/test_tune_storage.py::test_tune_study_of_another_search_is_rejected_before_any_trial",
    ],
    "Pass the storage of the study, as in `--storage sqlite:///study.db`.": [
        "tests/cli/test_tune_storage.py::test_tune_study_name_without_storage_raises",
    ],
    "Use `--pruner none`, or an objective that is measured in each round, such as final_accuracy/server.": [
        "tests/cli/test_tune_pruning.py::test_tune_objective_measured_once_raises",
    ],
    "convert the value to numbers, text, tensors, or lists and dicts of such values.": [
        "tests/simulation/test_tensor_subclasses.py::test_unreadable_callback_state_raises_by_the_first_round",
    ],
    "Use another `checkpoint_io`, or set ": [
        "tests/simulation/test_tensor_subclasses.py::test_first_checkpoint_of_a_fit_is_read_back",
    ],
    "Resume from the newest checkpoint. The number of `devices` may differ.": [
        "tests/cli/test_ranks.py::test_fit_killed_process_leaves_resumable_checkpoint",
    ],
    "Correct the cause, then run the same command again:": [
        "tests/cli/test_sweep.py::test_fit_failed_seed_does_not_stop_others",
    ],
    "Run `pip install": ["tests/test_errors.py::test_require_package_missing_names_the_pip_package"],
    'Put the training code below `if __name__ == "__main__":`, or set `num_workers=0`.': [
        "tests/simulation/test_habits.py::test_script_without_main_guard_trains_without_workers",
    ],
    "Pass more inputs in `calibration`, like those of `example`, or use `export_onnx`.": [
        "tests/edge/test_export.py::test_export_int8_onnx_low_agreement_raises_and_keeps_old_file",
    ],
    "Delete the file. The next fit trains the session again.": [
        "tests/callbacks/test_base_session.py::test_base_session_cache_truncated_raises_until_deleted",
        "tests/callbacks/test_base_session.py::test_base_session_cache_missing_bias_raises_until_deleted",
    ],
    "If the client has more samples, set `max-samples`": [
        "tests/deployment/test_answers.py::test_upload_above_max_samples_is_read_with_larger_limit",
    ],
    "Start the nodes of the missing clients, or decrease `min-clients` in the run configuration.": [
        "tests/deployment/test_restart.py::test_serve_too_few_clients_raises_with_missing_clients",
    ],
    "Start the nodes of these clients, or fix": [
        "tests/deployment/test_restart.py::test_serve_after_too_few_uploads_resumes_identically",
    ],
    "Restore the newest checkpoint of the run, or choose another `out` to start a new run.": [
        "tests/deployment/test_restart.py::test_serve_excludes_and_names_client_of_later_round",
    ],
    "Check the name, or try again.": [
        "tests/zoo/test_hub.py::test_load_from_hub_missing_repository_raises_with_hint",
    ],
    ". The client then starts without the state that it kept.": [
        "tests/deployment/test_node_files.py::test_damaged_needed_state_raises_with_working_fix",
    ],
    "Set them next to `data`": [
        "tests/deployment/test_node_data.py::test_recipe_table_sets_columns_classes_and_scale",
    ],
    "Set `data` to the file with the training data of this client.": [
        "tests/deployment/test_node_data.py::test_read_data_invalid_part_raises_with_fix"
    ],
    "Remove the samples that the server does not use.": [
        "tests/deployment/test_node_data.py::test_read_data_invalid_part_raises_with_fix",
    ],
    "from a backup, or choose another `out` to start a new run.": [
        "tests/deployment/test_restart.py::test_serve_checkpoint_older_than_record_raises",
    ],
    "file with `group`, or use `ClassIncremental` in the recipe.": [
        "tests/deployment/test_node_data.py::test_domain_incremental_without_group_raises",
    ],
    "Set `clients` in the run configuration, for example clients=": [
        "tests/deployment/test_node_data.py::test_serve_stationary_with_node_files_equals_simulation",
    ],
    "To start new runs in the loggers, delete the file.": [
        "tests/cli/test_logger_runs.py::test_damaged_file_of_logger_runs_raises_until_deleted",
    ],
    ", or use another repository.": ["tests/zoo/test_hub.py::test_push_rejected_changes_nothing"],
    "Set `max_vectorized_clients=1`.": [
        "tests/local_training/test_one_at_a_time.py::test_state_stored_in_later_vectorized_step_raises",
    ],
    "Use --out ": ["tests/cli/test_appendix.py::test_appendix_hints_on_out_work"],
    "Use another --out, or move this file.": ["tests/cli/test_appendix.py::test_appendix_hints_on_out_work"],
    "Use another key in `citations` of your class.": [
        "tests/evaluation/test_hyperparameters.py::test_make_bibliography_rejects_two_entries_with_one_key",
    ],
    "Correct the BibTeX entry.": ["tests/test_citations.py::test_find_entries_rejects_invalid_citation"],
    "Write the whole entry, as in `citations = ": [
        "tests/test_citations.py::test_find_entries_rejects_invalid_citation",
    ],
}

# Hints whose whole text comes from a table or a value. Keys are the file and the function. Values are a test or a
# row.
PASSED_ON: dict[str, str] = {
    "data/adapters.py to_dataset": "tests/fixes.py, list of samples",
    "models/serialization.py validate_arguments": "tests/fixes_models.py, arguments of a network in a file",
    "validation.py _check_range": "tests/test_annotations.py",
    "validation.py check_argument": "tests/test_annotations.py",
    "simulation/setup_checks.py check_trainer": "tests/test_fixes.py",
    "deployment/messages.py check_same": "tests/fixes_files.py, other recipe on a node",
    "io/checkpoint.py read_checkpoint": "tests/fixes_files.py, checkpoint above the limit",
    "io/reading.py read_bytes": "tests/fixes_commands.py, file above the limit of bytes",
    "io/reading.py as_file_error": "tests/fixes_commands.py, arrays above the limit of bytes",
    "io/safe_yaml.py read_yaml": "tests/fixes_files.py, values too deep",
    "runs/diagnosis.py _check_value": "tests/fixes_files.py, number of epochs that is text",
}

# Hints that no test can raise, each with the reason.
UNTRIED: dict[str, str] = {
    "If another version of lightning-fcl contains the recipe, install that version. The entry's `made_with` contains "
    "the version of the run.": "needs another version of the package",
    'Install a supported version: pip install "lightning-fcl[flower]".': "needs another version of Flower",
    "Synchronize the clocks of both machines, for example with `timedatectl set-ntp true`.": "sets "
    "the clock of the machine",
    "Run `pip install --force-reinstall scikit-learn`.": "changes the installed packages",
    "Log in with `hf auth login` and a token with write access, and try again.": "needs an account of a hub",
}


def covers(hint, parts):
    """Return whether the hint of a row covers a text with these parts.

    If the longest part has several words, the hint must contain this part, or consist of several words of this part.
    Otherwise, the hint must contain all parts.
    """
    longest = max(parts, key=len)
    if len(longest.split()) > 1:
        return longest in hint or (len(hint.split()) > 1 and hint in longest)
    return all(part in hint for part in parts)


def untried(package, hints, elsewhere):
    """Return the hint texts that occur in more places of the package than rows and tests cover, with the places."""
    places = defaultdict(set)
    for site in package.sites():
        if site.parts:
            places[site.parts].add(f"{site.file}:{site.line}")
    found = {}
    for parts, where in places.items():
        rows = sum(covers(hint, parts) for hint in hints)
        tests = sum(len(tests) for hint, tests in elsewhere.items() if covers(hint, parts))
        if rows + tests < len(where):
            found[" ... ".join(parts)] = sorted(where)
    return found


@pytest.fixture(scope="module")
def package():
    return read_package(ROOT / "lightning_fcl")


HINTS = [row.hint for row in (*ROWS.values(), *FILE_ROWS.values())]


def test_each_hint_has_a_row_or_test(package):
    found = untried(package, HINTS, TRIED_ELSEWHERE)
    assert {text: where for text, where in found.items() if text not in UNTRIED} == {}
    assert UNTRIED.keys() <= found.keys()


def test_each_hint_without_a_constant_text_is_listed(package):
    found = {f"{site.file} {site.function.split('.')[-1]}" for site in package.sites() if not is_text(site)}
    assert found == PASSED_ON.keys()


def is_text(site):
    return site.parts or HOLE not in site.text


@pytest.mark.parametrize("part", TRIED_ELSEWHERE)
def test_referenced_test_exists_and_names_hint(part):
    longest = max((word.strip("`.,") for word in part.split()), key=len)
    for test in TRIED_ELSEWHERE[part]:
        file, _, name = test.partition("::")
        source = (ROOT / file).read_text()
        assert re.search(rf"^def {name}\(", source, re.MULTILINE)
        assert longest in source


SAMPLE = """
from lightning_fcl.words import SAVE, suggest

CONSTANT = "Use a constant text."
TABLE = {"a": "Use a text of a table."}

class Model:
    def check(self, mode, way="x"):
        if mode == 0:
            raise Error("...", hint="Use a plain text.")
        if mode == 1:
            raise Error("...", hint=f"Use `{mode}`, or a text with values.")
        if mode == 2:
            fix = "Use a text of a variable."
            if way:
                fix = "Use another text of a variable."
            raise Error("...", hint=fix)
        if mode == 3:
            raise Error("...", hint=CONSTANT if way else SAVE)
        if mode == 4:
            raise Error("...", hint=suggest(mode) or "Use a text after a function.")
        if mode == 5:
            self.refuse("Use a text that is passed on.")
        if mode == 6:
            raise Error("...", hint="Use a text " + "of two parts.")
        if mode == 7:
            message, fix_of_pair = pair(mode)
            raise Error(message, hint=fix_of_pair)
        raise Error("...", hint="")

    def refuse(self, remedy):
        raise Error("...", hint=remedy)

def pair(mode):
    return "...", "Use a text of a pair."
"""
WORDS = """
SAVE = "Use an imported text."

def suggest(mode):
    return f"Use a text that a function returns for {mode}."
"""
TEXTS = [
    "Use ` ... `, or a text with values.",
    "Use a constant text.",
    "Use a plain text.",
    "Use a text after a function.",
    "Use a text of a pair.",
    "Use a text of a variable.",
    "Use a text of two parts.",
    "Use a text that a function returns for ... .",
    "Use a text that is passed on.",
    "Use an imported text.",
    "Use another text of a variable.",
]


def test_untried_finds_hints_of_a_sample_package():
    sample = Package({"sample.py": SAMPLE, "words.py": WORDS})
    assert sorted(untried(sample, [], {})) == TEXTS
    assert untried(sample, [text.replace(" ... ", "1") for text in TEXTS], {}) == {}
    others = [text.replace(" ... ", "1") for text in TEXTS if "constant" not in text]
    assert [*untried(sample, others, {})] == ["Use a constant text."]
    assert untried(sample, others, {"Use a constant text.": ["tests/test_x.py::test_y"]}) == {}


def test_untried_same_hint_in_two_places_needs_two_rows():
    sample = Package({"a.py": 'raise Error("", hint="Leave it out.")', "b.py": 'raise Error("", hint="Leave it out.")'})
    assert untried(sample, ["Leave it out."], {}) == {"Leave it out.": ["a.py:1", "b.py:1"]}
    assert untried(sample, ["Leave it out.", "Leave it out."], {}) == {}


def test_untried_finds_new_hint(package):
    source = 'raise ValueError("...", hint="Use a hint without a row.")'
    assert untried(Package({"new.py": source}), HINTS, TRIED_ELSEWHERE) == {"Use a hint without a row.": ["new.py:1"]}
