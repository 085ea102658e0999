"""The schema of a JobSet, as far as the recipes use it; unknown fields are refused.

Written after JobSet's API `jobset.x-k8s.io/v1alpha2` as of its release 0.8:
github.com/kubernetes-sigs/jobset, api/jobset/v1alpha2/jobset_types.go and
config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml. A Job's template within it is Kubernetes'
own `batch/v1`, for whose schema see the test.
"""

from __future__ import annotations

from typing import Any

# RFC 1123's labels: what names of objects that become host names may be.
LABEL = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"


def _fields(*required: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}

JOBSET = _fields(
    "apiVersion",
    "kind",
    "metadata",
    "spec",
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=_fields(
        "name", name={"type": "string", "pattern": LABEL}, annotations=_TEXTS, labels=_TEXTS
    ),
    spec=_fields(
        "replicatedJobs",
        failurePolicy=_fields(
            maxRestarts={"type": "integer", "minimum": 0},
            restartStrategy={"enum": ["Recreate", "BlockingRecreate"]},
        ),
        replicatedJobs={
            "type": "array",
            "minItems": 1,
            "items": _fields(
                "name",
                "template",
                name={"type": "string", "pattern": LABEL},
                replicas={"type": "integer", "minimum": 0},
                template=_fields("spec", metadata={"type": "object"}, spec={"type": "object"}),
            ),
        },
    ),
)
