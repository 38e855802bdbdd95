"""The environment in which templates are filled in: where they are, and that a name without a value is an error."""

from __future__ import annotations

import functools

import jinja2

from primeslurm.base.paths import shipped


@functools.cache
def environment(*, autoescape: bool) -> jinja2.Environment:
    """The jinja2 environment over `templates/`; it keeps what it has compiled.

    Args:
        autoescape: what is filled in is text for HTML.
    """
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(shipped("templates")),
        undefined=jinja2.StrictUndefined,
        autoescape=autoescape,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
