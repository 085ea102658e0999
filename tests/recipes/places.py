"""Where the recipes lie, and what they say."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
TRAINER = str(Path(__file__).with_name("trainer.py"))
CREW = str(ROOT / "tests/multiprocess/crew.py")
BATCH = ROOT / "gpu/slurm/train.sbatch"
BATCH_SRUN = ROOT / "gpu/slurm/train-srun.sbatch"
SCRIPTS = (BATCH, ROOT / "tpu/train-tpu-vm.sh", ROOT / "tpu/train-slices.sh", BATCH_SRUN)
MANIFESTS = (ROOT / "gpu/kubernetes/jobset.yaml", ROOT / "tpu/kubernetes/jobset.yaml")
PAGES = (
    ROOT / "README.md",
    ROOT / "gpu/README.md",
    ROOT / "gpu/slurm/README.md",
    ROOT / "gpu/kubernetes/README.md",
    ROOT / "tpu/README.md",
    ROOT / "docs/containers.md",
)
