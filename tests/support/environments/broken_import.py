"""An environment whose import fails because a package is missing."""

import a_package_that_nobody_has  # type: ignore[import-not-found]  # noqa: F401
