"""The objects for Kubernetes are valid, give no pod more rights than it needs, and fit each other."""

import re
import tomllib
from collections.abc import Mapping
from itertools import permutations
from typing import Any, Final

import kubernetes_validate
import pytest
from kp_scorer.broker.queues import results_queues
from kp_scorer.settings import Settings
from kp_scorer.settings.loading import as_environment
from kp_scorer.settings.server_sections import intake_name

from tests.support.paths import REPOSITORY
from tests.support.rendering import container_variables, kubernetes, overlay_settings, unknown_settings

FLEETS: Final = ("divided/code", "divided/rest")
OVERLAYS: Final = ("redis", "rabbitmq", "gpu", "teams", *FLEETS)
VERSIONS: Final = ("1.28", "1.37")
"""The oldest and the newest version of Kubernetes whose schemas the objects must match."""

FOREIGN: Final = {
    "ScaledObject": "scaleTargetRef minReplicaCount maxReplicaCount advanced triggers",
    "TriggerAuthentication": "secretTargetRef",
    "ServiceMonitor": "selector endpoints",
}
"""Kinds that other projects define, with the fields that we use. No package brings their schemas."""


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> str:
    """An overlay of workers."""
    return str(request.param)


@pytest.fixture(params=[*OVERLAYS, "serve"])
def any_overlay(request: pytest.FixtureRequest) -> str:
    """An overlay of workers, or that of the server."""
    return str(request.param)


def objects(overlay: str) -> Mapping[str, dict[str, Any]]:
    """Return the objects of an overlay by kind, after checking that it has one of each."""
    rendered = kubernetes(overlay)
    by_kind = {each["kind"]: each for each in rendered}
    assert len(by_kind) == len(rendered)
    return by_kind


def pod(overlay: str) -> dict[str, Any]:
    spec: dict[str, Any] = objects(overlay)["Deployment"]["spec"]["template"]["spec"]
    return spec


def container(overlay: str) -> dict[str, Any]:
    (only,) = pod(overlay)["containers"]
    return dict(only)


def labels_of(overlay: str) -> dict[str, str]:
    labels: dict[str, str] = objects(overlay)["Deployment"]["spec"]["template"]["metadata"]["labels"]
    return labels


def mounted_secret(overlay: str) -> str:
    (name,) = (each["secret"]["secretName"] for each in pod(overlay)["volumes"] if "secret" in each)
    return str(name)


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_knows_every_field(any_overlay: str, version: str) -> None:
    own = [each for kind, each in objects(any_overlay).items() if kind not in FOREIGN]
    assert len(own) >= 4
    for each in own:
        kubernetes_validate.validate(each, version, strict=True)


def test_custom_resources_use_only_fields_of_their_definitions(overlay: str) -> None:
    assert {kind: set(objects(overlay)[kind]["spec"]) for kind in FOREIGN} == {
        kind: set(fields.split()) for kind, fields in FOREIGN.items()
    }


def test_the_image_is_this_version_and_its_settings_exist_and_load(any_overlay: str) -> None:
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    assert container(any_overlay)["image"] == f"kp-scorer:{version}" + "-gpu" * (any_overlay == "gpu")
    assert list(unknown_settings(container_variables(any_overlay))) == []
    assert overlay_settings(any_overlay)


def test_secrets_are_referred_to_and_lie_where_the_settings_look_for_them(any_overlay: str) -> None:
    assert "Secret" not in objects(any_overlay)
    (mounted,) = (each["mountPath"] for each in container(any_overlay)["volumeMounts"] if each["name"] in ("urls", "secrets"))
    files = [each["value"] for each in container(any_overlay)["env"] if each["name"].endswith("_FILE")]
    assert sorted(files) == [f"{mounted}/broker-url", f"{mounted}/redis-url"]


def test_a_pod_has_no_privileges(any_overlay: str) -> None:
    spec = pod(any_overlay)
    assert spec["enableServiceLinks"] is False
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
    assert container(any_overlay)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {kind for volume in spec["volumes"] for kind in volume} == {"name", "emptyDir", "secret"}


def test_a_pod_has_probes_its_time_to_stop_and_the_cores_that_it_requests(overlay: str) -> None:
    (port,) = container(overlay)["ports"]
    asked = {name: container(overlay)[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    paths = {"startup": "/livez", "liveness": "/livez", "readiness": "/readyz"}
    assert asked == {name: {"path": path, "port": port["name"]} for name, path in paths.items()}
    assert pod(overlay)["terminationGracePeriodSeconds"] >= Settings().worker.grace_s + 5
    assert container(overlay)["resources"]["limits"]["cpu"] == container(overlay)["resources"]["requests"]["cpu"]


def test_workers_with_a_gpu_ask_for_one_and_are_replaced_without_a_second() -> None:
    resources = container("gpu")["resources"]
    assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"] == "1"
    assert objects("gpu")["Deployment"]["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 1, "maxSurge": 0}


def test_everything_is_about_these_pods(any_overlay: str) -> None:
    each, labels = objects(any_overlay), labels_of(any_overlay)
    assert labels == each["Service"]["metadata"]["labels"]
    selecting = {kind: each[kind]["spec"]["selector"] for kind in ("Deployment", "PodDisruptionBudget", "ServiceMonitor")}
    selecting["NetworkPolicy"] = each["NetworkPolicy"]["spec"]["podSelector"]
    (spread,) = pod(any_overlay)["topologySpreadConstraints"]
    selecting["spread over nodes"] = spread["labelSelector"]
    assert {kind for kind, selector in selecting.items() if selector != {"matchLabels": labels}} == set()
    assert each["Service"]["spec"]["selector"] == labels
    (scaler,) = (each[kind] for kind in ("ScaledObject", "HorizontalPodAutoscaler") if kind in each)
    assert scaler["spec"]["scaleTargetRef"]["name"] == each["Deployment"]["metadata"]["name"]


def test_workers_scale_by_cores_and_by_the_queue_of_traces_with_a_secret_of_its_own(overlay: str) -> None:
    cpu, *triggers = objects(overlay)["ScaledObject"]["spec"]["triggers"]
    assert cpu["type"] == "cpu"
    queues = overlay_settings(overlay).queues
    authentication = objects(overlay)["TriggerAuthentication"]
    assert {trigger["authenticationRef"]["name"] for trigger in triggers} == {authentication["metadata"]["name"]}
    counted = [(trigger["type"], trigger["metadata"]) for trigger in triggers]
    if overlay == "rabbitmq":
        # Over AMQP, KEDA counts only ready messages. Over HTTP it would also count those in flight, which workers hold already.
        asked = {"protocol": "amqp", "mode": "QueueLength", "value": "120"}
        assert counted == [("rabbitmq", asked | {"queueName": name}) for name in (queues.first, intake_name(queues.first))]
    else:
        length = "2200" if overlay == "gpu" else "120"
        assert counted == [("redis", {"listName": name, "listLength": length}) for name in queues.traces]
    # The scaler only counts messages, so it must not get the workers' passwords.
    secrets = {each["name"] for each in authentication["spec"]["secretTargetRef"]}
    assert secrets == {mounted_secret(overlay).replace("kp-scorer", "kp-scorer-scaler")}


def test_divided_holds_the_objects_of_both_fleets_and_each_has_its_own_names() -> None:
    both = [each for fleet in FLEETS for each in kubernetes(fleet)]
    assert sorted(kubernetes("divided"), key=str) == sorted(both, key=str)
    names = [(each["kind"], each["metadata"]["name"]) for each in both]
    # Prometheus takes the Service's name as the job, so equal names would mix the metrics of the fleets.
    assert len(set(names)) == len(names) == 2 * len(objects("redis"))
    assert "jobLabel" not in objects(FLEETS[0])["ServiceMonitor"]["spec"]
    assert len({mounted_secret(fleet) for fleet in FLEETS}) == 2


def test_labels_of_one_fleet_select_no_pod_of_the_other_and_none_of_the_server() -> None:
    labels = [labels_of(overlay) for overlay in (*FLEETS, "serve")]
    assert not any(first.items() <= second.items() for first, second in permutations(labels, 2))


def test_fleets_differ_only_in_the_settings_that_the_operators_page_names() -> None:
    of_code, of_rest = map(overlay_settings, FLEETS)
    differing = {name for name, value in as_environment(of_code).items() if value != as_environment(of_rest)[name]}
    page = (REPOSITORY / "deploy" / "OPERATIONS.md").read_text("utf-8")
    (named,) = re.findall(r"Two fleets differ in ([^.]+(?:\.\w[^.]*)+)\.\s", page)
    assert differing == {f"KP_{section}_{name}".upper() for section, name in re.findall(r"`(\w+)\.(\w+)`", named)}
    queues = [
        {each.queues.first, intake_name(each.queues.first), *results_queues(each, each.results.publish)}
        for each in (of_code, of_rest)
    ]
    assert not queues[0] & queues[1]


def test_the_server_has_a_grace_period_ports_probes_and_a_service_of_its_own() -> None:
    server = container("serve")
    assert pod("serve")["securityContext"] == pod("redis")["securityContext"]
    assert pod("serve")["terminationGracePeriodSeconds"] >= Settings().worker.grace_s + 5
    serving, metrics = Settings().serve, Settings().metrics.of_serve()
    ports = {each["name"]: each["containerPort"] for each in server["ports"]}
    assert ports == {"http": serving.port, "grpc": serving.grpc_port, "metrics": metrics.port}
    assert [server[f"{name}Probe"]["httpGet"]["path"] for name in ("liveness", "readiness")] == ["/livez", "/readyz"]
    assert labels_of("serve") != objects("redis")["Service"]["spec"]["selector"]


def test_the_server_is_monitored_and_scaled_and_open_to_all() -> None:
    each = objects("serve")
    assert [endpoint["port"] for endpoint in each["ServiceMonitor"]["spec"]["endpoints"]] == ["metrics"]
    assert {port["name"]: port["targetPort"] for port in each["Service"]["spec"]["ports"]}["metrics"] == "metrics"
    assert overlay_settings("serve").metrics.host == "0.0.0.0"
    (open_to_all, open_to_prometheus) = each["NetworkPolicy"]["spec"]["ingress"]
    assert open_to_all == {"ports": [{"port": "http"}, {"port": "grpc"}]}
    assert open_to_prometheus == objects("redis")["NetworkPolicy"]["spec"]["ingress"][0] | {"ports": [{"port": "metrics"}]}
    assert each["HorizontalPodAutoscaler"]["spec"]["minReplicas"] == 2
    assert "replicas" not in each["Deployment"]["spec"]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_nightly_set_is_chosen_by_an_unprivileged_pod_that_reaches_only_redis(version: str) -> None:
    each = objects("keep")
    for own in each.values():
        kubernetes_validate.validate(own, version, strict=True)
    spec = each["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    (only,) = spec["containers"]
    assert spec["securityContext"] == pod("redis")["securityContext"]
    assert only["securityContext"] == container("redis")["securityContext"]
    assert only["image"] == container("redis")["image"]
    assert only["args"][-1] in [mount["mountPath"] for mount in only["volumeMounts"]]
    (claim,) = (volume["persistentVolumeClaim"]["claimName"] for volume in spec["volumes"] if "persistentVolumeClaim" in volume)
    assert claim == each["PersistentVolumeClaim"]["metadata"]["name"]
    assert list(unknown_settings({variable["name"]: "" for variable in only["env"]} | each["ConfigMap"]["data"])) == []
    policy = each["NetworkPolicy"]["spec"]
    assert (
        policy["podSelector"]["matchLabels"] == each["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]["metadata"]["labels"]
    )
    assert policy["egress"] == objects("redis")["NetworkPolicy"]["spec"]["egress"]
    assert "ingress" not in policy
