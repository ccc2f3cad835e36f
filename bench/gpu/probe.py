"""What torch sees here, as a line of JSON."""

from __future__ import annotations

import json
import platform

import torch


def main() -> None:
    facts: dict[str, object] = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "gpu": properties.name,
            "arch": f"{properties.major}{properties.minor}",
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
        }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
