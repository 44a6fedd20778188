"""Checks the version of transformers before anything else of it is imported."""

NEEDED = (
    "pipecomm_ext.integrations.transformers needs Hugging Face transformers from 5.10 on: "
    'pip install "transformers>=5.10,<6"'
)

try:
    from transformers import __version__ as version
except ImportError as error:
    raise ImportError(NEEDED) from error
_number = tuple(map(int, version.split(".")[:2]))
if _number < (5, 10):  # older ones make masks of positions
    raise ImportError(f"{NEEDED}; it is {version}")
CACHE = "cache" if _number >= (5, 24) else "past_key_values"  # the keyword for the cache of a forward
