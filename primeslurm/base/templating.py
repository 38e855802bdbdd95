"""The jinja2 environment of the templates in `templates/`."""

from __future__ import annotations

import functools

import jinja2

from primeslurm.base.paths import shipped


@functools.cache
def environment(*, autoescape: bool) -> jinja2.Environment:
    """Return the environment, which caches compiled templates. Set `autoescape` for HTML."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(shipped("templates")),
        undefined=jinja2.StrictUndefined,
        autoescape=autoescape,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
