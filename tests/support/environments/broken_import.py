"""An environment whose import fails: a package that it needs is not installed."""

import a_package_that_nobody_has  # type: ignore[import-not-found]  # noqa: F401
