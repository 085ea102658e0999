"""Every option that a recipe or a page gives `jaxft run` is one that it has."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from jaxft.__main__ import app
from tests.recipes.places import MANIFESTS, PAGES, ROOT, SCRIPTS

# An option in a shell's words, or in an item of a YAML list.
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")


def flags() -> set[str]:
    run = typer.main.get_command(app).commands["run"]  # type: ignore[attr-defined]
    return {name for option in run.params for name in (*option.opts, *option.secondary_opts)}


def shell_options(text: str) -> set[str]:
    """Those of `jaxft run` in a script or a page: up to the `--`, over continued lines, and those
    that are gathered in an array for it."""
    joined = text.replace("\\\n", " ")
    found = re.findall(r"jaxft run(.*?)(?: -- | -- *$|`|$)", joined, re.MULTILINE)
    found += re.findall(r"options\+?=\((.*?)\)", joined)
    return {option for part in found for option in OPTION.findall(part)}


def listed_options(text: str) -> set[str]:
    """Those of `- jaxft`, `- run` in the lists of a manifest."""
    found: set[str] = set()
    for _, command in re.findall(r"^( *)- jaxft\n((?:\1.*\n)+?)\1- --\n", text, re.MULTILINE):
        found |= set(OPTION.findall(command))
    return found


def unknown(path: Path) -> set[str]:
    text = path.read_text()
    options = listed_options(text) if path.suffix == ".yaml" else shell_options(text)
    if path in (*SCRIPTS[:2], *MANIFESTS):
        assert {"--job", "--hosts", "--code", "--store", "--job-key-file"} <= options, options
    return options - flags()


def test_every_option_in_a_recipe_is_one_of_jaxft_run():
    wrong = {str(path.relative_to(ROOT)): unknown(path) for path in (*SCRIPTS, *MANIFESTS, *PAGES)}
    assert not {path: options for path, options in wrong.items() if options}


def test_an_option_that_there_is_not_would_be_found(tmp_path):
    script = tmp_path / "train.sh"
    script.write_text("jaxft run --hosts 2 \\\n  --no-such-thing 3 -- python train.py --its-own\n")
    manifest = tmp_path / "jobset.yaml"
    manifest.write_text("  - jaxft\n  - run\n  # --said\n  - --nothing=1\n  - --\n  - --its-own\n")
    assert unknown(script) == {"--no-such-thing"}
    assert "--nothing" in unknown(manifest)
    assert "--its-own" not in unknown(manifest)
