"""What was measured so far, in memory and, if asked for, in a JSON file that later runs add to."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

from bench.peers.floors import Peak
from bench.peers.table import Samples


@dataclass(slots=True)
class Run:
    """path: None keeps nothing. peaks: by job, beside its samples; what a machine that others
    share can do changes within minutes. failures: "job peer options" to what went wrong; that is
    not tried again. num_rounds: of all runs that added to the file."""

    path: Path | None
    samples: Samples = field(default_factory=Samples)
    peaks: dict[str, list[Peak]] = field(default_factory=dict)
    num_rounds: int = 0
    failures: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path | None) -> Run:
        """Empty if the file is not there yet."""
        run = cls(path)
        if path is None or not path.exists():
            return run
        data = json.loads(path.read_text())
        run.num_rounds = data["num_rounds"]
        run.failures = data["failures"]
        for job, peaks in data["peaks"].items():
            run.peaks[job] = [Peak(**peak) for peak in peaks]
        for entry in data["samples"]:
            key = (entry["job"], entry["peer"], entry["variant"])
            run.samples.values[key] = entry["figures"]
        return run

    def save(self) -> None:
        if self.path is None:
            return
        data = {
            "num_rounds": self.num_rounds,
            "failures": self.failures,
            "peaks": {
                job: [dataclasses.asdict(peak) for peak in peaks]
                for job, peaks in self.peaks.items()
            },
            "samples": [
                {"job": job, "peer": peer, "variant": variant, "figures": figures}
                for (job, peer, variant), figures in self.samples.values.items()
            ],
        }
        self.path.write_text(json.dumps(data, indent=1) + "\n")
