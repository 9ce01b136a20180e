"""Where a checkpoint lies. Apart from the engine, because a server's other processes need the folder and no torch.

Chapter 1 tells this module's story.
"""

from __future__ import annotations

from pathlib import Path

TINY = Path(__file__).parent / "tiny"


def find_model(name: str) -> Path:
    """The folder of a model: the bundled one for "tiny", a folder, or a download from the hub.

    Raises:
        ValueError: it is neither a folder nor on the hub, or the hub cannot be reached.
    """
    if name == "tiny":
        return TINY
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download  # heavy, and only needed here

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]))
    except Exception as error:  # the hub's client raises all kinds of errors for names and networks
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise ValueError(f"model {name!r} is neither a folder nor to be had from the hub: {reason}") from error
