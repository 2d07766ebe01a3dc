"""Settings of the documentation: `make docs` builds it, where each warning is an error."""

import sys
from pathlib import Path

import lightning_fcl

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

project = "lightning-fcl"
author = "the authors of lightning-fcl"
version = release = lightning_fcl.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "api_pages",  # ours: a table of names on top of a package's page
    "beyond_docs",  # ours: links to files of the repository that are not below docs/
    "offline",  # ours: a built page that asks another host for anything is a warning
]
exclude_patterns = ["_extensions"]
show_warning_types = True

# Markdown. Headings are link targets, as on GitHub.
myst_heading_anchors = 3

# Notebooks run anew in each build; what one prints on stderr is no part of it.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_output_stderr = "remove"
nb_merge_streams = True
nb_render_markdown_format = "myst"
nb_ipywidgets_js = {}  # its scripts would come from another host

# Docstrings: google style, single backticks name our own objects.
default_role = "py:obj"
napoleon_numpy_docstring = False
autodoc_inherit_docstrings = False  # hooks of Lightning that we override without a word
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
add_module_names = False
autosummary_generate = False  # the pages of docs/api are all there are
toc_object_entries_show_parents = "hide"

html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = "lightning-fcl"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["sort.js"]
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
copybutton_exclude = ".linenos, .gp, .go"
