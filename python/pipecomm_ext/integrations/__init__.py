"""Other libraries' models over this package. A module and its library are loaded on first use."""

import importlib


def __getattr__(name):
    if name == "transformers":
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
