"""The manifests for Kubernetes fit their schemas, and their parts each other; without a cluster.

Kubernetes' own kinds are held against its schemas, from the package kubernetes-validate, in which
no unknown field is allowed; a JobSet against `jobset_schema`, and the Jobs that it makes as Jobs.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from jaxft.group.placement import crowded_domains, form_groups
from jaxft.group.world import Code
from jaxft.launch.options import parse_hosts
from tests.recipes.jobset_schema import JOBSET
from tests.recipes.places import MANIFESTS, ROOT

Object = dict[str, Any]
# The oldest that knows all fields (podReplacementPolicy), and the newest that the package knows.
VERSIONS = ("1.29", "1.37")
GPU, TPU = MANIFESTS


def objects(path: Path) -> list[Object]:
    return list(yaml.safe_load_all(path.read_text()))


def one(path: Path, kind: str) -> Object:
    (found,) = [each for each in objects(path) if each["kind"] == kind]
    return found


def jobs(jobset: Object) -> list[Object]:
    """The first Job of each kind that the JobSet makes."""
    name = jobset["metadata"]["name"]
    return [
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": f"{name}-{each['name']}-0"},
            **each["template"],
        }
        for each in jobset["spec"]["replicatedJobs"]
    ]


def agent(path: Path) -> Object:
    """The one container of the pods, with its pod's and its Job's settings beside it."""
    (job,) = jobs(one(path, "JobSet"))
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    return {"job": job["spec"], "pod": pod, **container}


def options(path: Path) -> dict[str, str]:
    """What `jaxft run` is given, by option."""
    command = agent(path)["command"]
    assert command[:2] == ["jaxft", "run"]
    given = command[2 : command.index("--")]
    assert all(re.fullmatch(r"--[a-z-]+=\S+", word) for word in given), given
    return dict(word.split("=", 1) for word in given)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_object_fits_its_schema(path, version):
    for each in objects(path):
        if each["kind"] == "JobSet":
            jsonschema.Draft202012Validator(JOBSET).validate(each)
            for job in jobs(each):
                kubernetes_validate.validate(job, version, strict=True)
        else:
            kubernetes_validate.validate(each, version, strict=True)


def test_what_does_not_fit_is_found():
    wrong = copy.deepcopy(one(GPU, "JobSet"))
    wrong["spec"]["replicatedJobs"][0]["replica"] = 3
    with pytest.raises(jsonschema.ValidationError, match="replica"):
        jsonschema.Draft202012Validator(JOBSET).validate(wrong)
    (job,) = jobs(one(GPU, "JobSet"))
    job["spec"]["template"]["spec"]["containers"][0]["comand"] = []
    with pytest.raises(jsonschema.ValidationError, match="comand"):
        kubernetes_validate.validate(job, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_in_a_manifest_mean_each_other(path):
    service, stateful = one(path, "Service"), one(path, "StatefulSet")
    assert stateful["spec"]["serviceName"] == service["metadata"]["name"]
    labels = stateful["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert stateful["spec"]["selector"]["matchLabels"].items() <= labels.items()
    port = service["spec"]["ports"][0]["port"]
    assert options(path)["--store"] == f"etcd://{service['metadata']['name']}:{port}"
    (server,) = stateful["spec"]["template"]["spec"]["containers"]
    assert f"--listen-client-urls=http://0.0.0.0:{port}" in server["command"]
    # Only the job's own pods reach the job and its etcd.
    here = agent(path)
    own = here["job"]["template"]["metadata"]["labels"]["app"]
    policy = one(path, "NetworkPolicy")["spec"]
    (selected,) = policy["podSelector"]["matchExpressions"]
    assert {own, labels["app"]} == set(selected["values"])
    (rule,) = policy["ingress"]
    assert rule["from"] == [{"podSelector": {"matchLabels": {"app": own}}}]
    # Mounted volumes are there, and the key's file is where the agent looks, for its eyes alone.
    volumes = {volume["name"]: volume for volume in here["pod"]["volumes"]}
    assert {mount["name"] for mount in here["volumeMounts"]} == set(volumes)
    key = Path(options(path)["--job-key-file"])
    mounts = {mount["name"]: mount["mountPath"] for mount in here["volumeMounts"]}
    assert mounts["key"] == str(key.parent)
    assert volumes["key"]["secret"]["defaultMode"] == 0o400
    secret = volumes["key"]["secret"]["secretName"]
    assert f"create secret generic {secret} --from-literal={key.name}=" in path.read_text()
    # What is put into the command is there to be put.
    variables = set(re.findall(r"\$\((\w+)\)", " ".join(here["command"])))
    assert variables == {variable["name"] for variable in here["env"]}


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_numbers_in_a_manifest_fit_each_other(path):
    here, given = agent(path), options(path)
    (replicated,) = one(path, "JobSet")["spec"]["replicatedJobs"]
    hosts_min, hosts_max = parse_hosts(given["--hosts"])
    count = here["job"]["parallelism"]
    assert here["job"]["completions"] == count
    assert replicated["replicas"] * count == hosts_max
    code = Code.parse(given["--code"])
    assert code.parity < hosts_min
    # A lost pod is made again alone, and its index, which is its host's name, comes back.
    assert here["job"]["backoffLimit"] > 0
    assert here["job"]["completionMode"] == "Indexed"
    assert here["pod"]["restartPolicy"] == "Never"
    # Kubernetes takes no other policy beside a podFailurePolicy.
    assert here["job"]["podReplacementPolicy"] == "Failed"
    failing = here["job"]["podFailurePolicy"]["rules"][1]
    assert failing["onExitCodes"]["containerName"] == here["name"]
    # The agent has its whole time before it is killed.
    ending = float(given["--grace-s"])
    assert here["pod"]["terminationGracePeriodSeconds"] > ending
    # Memory that is promised is memory that may be used: the pod is not evicted for it.
    resources = here["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"]


def test_a_whole_slice_may_be_lost():
    given, here = options(TPU), agent(TPU)
    (replicated,) = one(TPU, "JobSet")["spec"]["replicatedJobs"]
    slices, workers = replicated["replicas"], here["job"]["completions"]
    assert given["--failure-domain"] == "slice$(SLICE)"
    domains = [f"slice{index}" for index in range(slices) for _ in range(workers)]
    groups = form_groups(len(domains), Code.parse(given["--code"]), domains)
    assert not crowded_domains(groups, domains)
    topology = here["pod"]["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    chips = [int(size) for size in topology.split("x")]
    assert chips[0] * chips[1] == workers * int(here["resources"]["limits"]["google.com/tpu"])
