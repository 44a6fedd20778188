"""Other libraries' models over this package. A module is loaded, and its library with it, when it is used."""

import importlib


def __getattr__(name):
    if name == "transformers":
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
