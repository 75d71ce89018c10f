"""Kubernetes as its pods see it: a cluster whose containers are processes of this machine.

A pod is a namespace of network, host name, mounts and processes, with the files that kubelet writes, nothing
but its variables, and a name server (dnsmasq) that knows the pods' names from the moment at which they start.
What a pod is made of comes from a manifest (controllers.py). Needs root, iproute2, util-linux and overlayfs;
nothing of it reaches outside, and it leaves nothing behind.
https://kubernetes.io/docs/concepts/services-networking/dns-pod-service/
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import netns
from joining import DEADLINE_S, ROOT, SECRET

__all__ = ["Cluster", "Pod", "available"]

_DNS = "10.96.0.10"
_NET = "10.244.0"
_DOMAIN = "default.svc.cluster.local"
_numbers = itertools.count()
#: What kubelet tells every container of the service of the API, also without enableServiceLinks.
_API = {
    "KUBERNETES_PORT": "tcp://10.96.0.1:443",
    "KUBERNETES_PORT_443_TCP": "tcp://10.96.0.1:443",
    "KUBERNETES_PORT_443_TCP_ADDR": "10.96.0.1",
    "KUBERNETES_PORT_443_TCP_PORT": "443",
    "KUBERNETES_PORT_443_TCP_PROTO": "tcp",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "KUBERNETES_SERVICE_PORT": "443",
    "KUBERNETES_SERVICE_PORT_HTTPS": "443",
}
#: No file of this machine's; NXDOMAIN for what is not known, at once and for everybody.
_DNS_OPTIONS = (
    *("--keep-in-foreground", "--bind-interfaces", "--user=root", "--pid-file", "--log-facility=-"),
    *("--conf-file=/dev/null", "--no-resolv", "--no-hosts", "--local=//", "--address=/#/", "--local-ttl=0"),
)
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#: The container's root: this machine's, over which it writes to memory. $1 is the pod's folder.
_ROOT = """
mount -t tmpfs pod "$1/layer" && mkdir "$1/layer/upper" "$1/layer/work" "$1/layer/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/layer/upper,workdir=$1/layer/work" "$1/layer/root"
cd "$1/layer/root"
mount -t proc proc proc; mount --rbind /dev dev; mount --rbind /sys sys
mount -t tmpfs -o size=64m shm dev/shm
"""
_PROBE = """
hostname probe; mount -t tmpfs probe /tmp; cd /tmp; mkdir u w r
mount -t overlay probe -o lowerdir=/,upperdir=u,workdir=w r
"""


@dataclass
class Pod:
    """What a controller asks kubelet to run."""

    name: str
    hostname: str
    spec: dict[str, Any]
    subdomain: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    #: Where the files of volumes lie that a controller has made for it, by the volumes' names.
    folders: dict[str, Path] = field(default_factory=dict)

    @property
    def uname(self) -> str:
        """The host name that its processes see."""
        return "node7" if self.spec.get("hostNetwork") else self.hostname

    @property
    def container(self) -> dict[str, Any]:
        """The one that the tests' pods have."""
        (only,) = self.spec["containers"]
        return dict(only)

    def field(self, path: str) -> str:
        """What the downward API says. https://kubernetes.io/docs/concepts/workloads/pods/downward-api/"""
        if match := re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path):
            return str(getattr(self, match[1]).get(match[2], ""))
        return {"metadata.name": self.name, "metadata.namespace": "default"}[path]


@functools.cache
def available() -> str:
    """Why there can be no cluster here; empty: there can."""
    if shutil.which("dnsmasq") is None:
        return "needs Debian's dnsmasq-base"
    if not netns.available():
        return "needs root and iproute2"
    probe = subprocess.run(["unshare", "-umpf", "--mount-proc", "sh", "-ec", _PROBE], capture_output=True)
    return "needs namespaces and overlayfs" if probe.returncode else ""


class Running:
    """A pod that has been started: its network, and its container as often as that was started."""

    def __init__(self, pod: Pod, folder: Path, namespace: str, address: str) -> None:
        self.pod = pod
        self.folder = folder
        self.namespace = namespace
        self.address = address
        self.restarts = 0
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        """What its container has printed."""
        return (self.folder / "log").read_text("utf-8", "replace")

    @property
    def status(self) -> int | None:
        """Exit status of its container, as kubelet says it; None while it runs."""
        assert self.process is not None
        status = self.process.poll()
        return status if status is None or status >= 0 else 128 - status

    def signal(self, number: int) -> None:
        """Send a signal to the process that the container was started with."""
        assert self.process is not None
        (pid,) = _children(self.process.pid)
        if self.pod.spec.get("shareProcessNamespace"):
            (pid,) = _children(pid)
        os.kill(pid, number)


class Cluster:
    """A node with its name server, and pods on it.

    Args:
        folder: for files.
        services: the manifests of headless services.
        secrets: of the namespace: the keys and values of each.
        image: a shell script that has made the image of this machine; it runs in each container before.
    """

    def __init__(
        self,
        folder: Path,
        services: Sequence[Mapping[str, Any]] = (),
        secrets: Mapping[str, Mapping[str, str]] | None = None,
        image: str = "",
    ) -> None:
        self.secrets = {"polyhvd": {"secret": SECRET}} if secrets is None else secrets
        self.pods: dict[str, Running] = {}
        self._services = services
        self._image = image
        self._folder = folder
        self._stack = contextlib.ExitStack()
        self._node = f"k8s{os.getpid()}n"
        self._count = 0
        self._dns: subprocess.Popen[bytes] | None = None
        self._bin = folder / "bin"
        self.app = folder / "app"
        self.app.mkdir()
        self._write_commands()

    def __enter__(self) -> Cluster:
        with self._stack:  # undone if something goes wrong
            self._stack.callback(_ip, "netns", "del", self._node, check=False)
            _ip("netns", "add", self._node)
            _ip("-n", self._node, "link", "set", "lo", "up")
            _ip("-n", self._node, "link", "add", "cni0", "type", "bridge")
            _ip("-n", self._node, "addr", "add", f"{_NET}.1/24", "dev", "cni0")
            _ip("-n", self._node, "addr", "add", f"{_DNS}/32", "dev", "lo")
            _ip("-n", self._node, "link", "set", "cni0", "up")
            self._start_dns()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def train(self, source: str) -> None:
        """Put this program into the image, as train.py in its working directory."""
        (self.app / "train.py").write_text(source)

    def start(self, pod: Pod) -> Running:
        """Run a pod, which then has a name, and its container."""
        self._count += 1
        namespace, address = f"k8s{os.getpid()}p{next(_numbers)}", f"{_NET}.{self._count + 1}"
        folder = self._folder / f"pod{self._count}"
        (folder / "layer").mkdir(parents=True)
        (folder / "log").touch()
        self._stack.callback(_ip, "netns", "del", namespace, check=False)
        _ip("netns", "add", namespace)
        wire = f"v{self._count}"
        _ip("-n", self._node, "link", "add", wire, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _ip("-n", self._node, "link", "set", wire, "master", "cni0", "up")
        _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", namespace, "link", "set", device, "up")
        _ip("-n", namespace, "route", "add", "default", "via", f"{_NET}.1")
        running = self.pods[pod.name] = Running(pod, folder, namespace, address)
        self._write_etc(running)
        self.publish()
        self.start_container(running)
        return running

    def start_container(self, running: Running) -> None:
        """Run its container, for the first time or again."""
        pod, folder = running.pod, running.folder
        variables = self.environment(pod)
        words = [*pod.container.get("command", []), *pod.container.get("args", [])]
        image = f"chroot . sh -ec {_quoted(self._image)}"
        run = '"$@" & wait $!' if pod.spec.get("shareProcessNamespace") else 'exec "$@"'
        container = f'exec chroot . sh -c {_quoted("cd /app; " + run)} sh "$@"'
        script = [_ROOT, *self._mounts(running), 'hostname "$2"', "shift 2", image, container]
        command = ["nsenter", f"--net=/run/netns/{running.namespace}", "unshare", "-umpif", "--kill-child"]
        command += ["sh", "-ec", "\n".join(script), "pod", str(folder), pod.uname]
        path = f"{self._bin}:{_SYSTEM_PATH}"
        with open(folder / "log", "ab") as log:
            running.process = subprocess.Popen(
                [*command, *(_expanded(variables, word) for word in words)],
                env={"PATH": path, "HOME": "/root", "HOSTNAME": pod.uname, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._stack.callback(_end, running.process)

    def environment(self, pod: Pod) -> dict[str, str]:
        """The container's variables. A Secret that is not there is an error, as it is for kubelet."""
        variables = dict(_API)
        for item in pod.container.get("env", []):
            source = item.get("valueFrom", {})
            if "fieldRef" in source:
                variables[item["name"]] = pod.field(source["fieldRef"]["fieldPath"])
            elif "secretKeyRef" in source:
                reference = source["secretKeyRef"]
                variables[item["name"]] = self.secrets[reference["name"]][reference["key"]]
            else:
                variables[item["name"]] = _expanded(variables, item.get("value", ""))
        return variables

    def delete(self, running: Running) -> float:
        """SIGTERM, the pod's grace period, SIGKILL, and no name any more; the seconds until its end."""
        began = time.monotonic()
        running.signal(signal.SIGTERM)
        grace_s = running.pod.spec.get("terminationGracePeriodSeconds", 30)
        assert running.process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.process.wait(grace_s)
        self.evict(running)
        return time.monotonic() - began

    def evict(self, running: Running) -> None:
        """End a pod at once, and take its name and its network away."""
        assert running.process is not None
        _end(running.process)
        del self.pods[running.pod.name]
        _ip("netns", "del", running.namespace)
        self.publish()

    def reconcile(self) -> int:
        """Do once what kubelet and the Job's controller do about containers that have ended.

        Returns how many were started. Nothing is delayed, and there is no backoffLimit:
        https://kubernetes.io/docs/concepts/workloads/controllers/job/#pod-backoff-failure-policy
        """
        started = 0
        for running in list(self.pods.values()):
            policy = running.pod.spec.get("restartPolicy", "Always")
            if running.status is None or (running.status == 0 and policy != "Always"):
                continue
            started += 1
            if policy == "Never":
                self.evict(running)
                self.start(running.pod)  # a new one, with another address
            else:
                running.restarts += 1
                self.start_container(running)
        return started

    def wait_for(self, condition: Callable[[], Any], *, seconds: float = DEADLINE_S) -> None:
        """Until it is true; fails with all logs when it is not in time."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.05)

    def finish(self) -> list[int]:
        """Exit statuses of all containers, in order of the pods, after their end."""
        self.wait_for(lambda: all(running.status is not None for running in self.pods.values()))
        return [running.status or 0 for running in self.pods.values()]

    def logs(self) -> str:
        """All that was printed, by pod."""
        return "\n".join(f"--- {name}: {one.status}\n{one.log}" for name, one in self.pods.items())

    def places(self) -> list[str]:
        """The lines of joining.WORK that pods have printed."""
        lines = [line for one in self.pods.values() for line in one.log.splitlines()]
        return sorted(line[line.index("place") :] for line in lines if "place " in line and " sum " in line)

    def publish(self) -> None:
        """Have the name server know the pods that run now; it answers NXDOMAIN for all else."""
        lines = []
        for running in self.pods.values():
            for service in self._services:
                name, spec = service["metadata"]["name"], service["spec"]
                selected = spec["selector"].items() <= running.pod.labels.items()
                if running.pod.subdomain == name and selected and spec.get("clusterIP") == "None":
                    host = f"{running.pod.hostname}.{name}.{_DOMAIN}"
                    lines.append(f"{running.address} {host} {name}.{_DOMAIN}\n")
        (self._folder / "names").write_text("".join(lines))
        if self._dns is not None:
            self._dns.send_signal(signal.SIGHUP)

    def stop_dns(self) -> None:
        """The name server is silent from now on."""
        assert self._dns is not None
        self._dns.send_signal(signal.SIGSTOP)

    def _start_dns(self) -> None:
        self.publish()
        arguments = [*_DNS_OPTIONS, f"--listen-address={_DNS}", f"--addn-hosts={self._folder}/names"]
        with open(self._folder / "dns.log", "wb") as log:
            self._dns = subprocess.Popen(
                ["ip", "netns", "exec", self._node, "dnsmasq", *arguments], stdout=log, stderr=log
            )
        self._stack.callback(_end, self._dns)
        ready = functools.partial(_listens, self._node)
        self.wait_for(lambda: ready() or self._dns is None or self._dns.poll() is not None)
        assert self._dns.poll() is None, (self._folder / "dns.log").read_text()

    def _write_commands(self) -> None:
        """The commands of the image: those of this checkout."""
        self._bin.mkdir()
        modules = {"python": "", "polyhvdrun": "-m polyhvd.launch", "torchrun": "-m torch.distributed.run"}
        for name, words in modules.items():
            (self._bin / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
            (self._bin / name).chmod(0o755)

    def _write_etc(self, running: Running) -> None:
        pod, folder = running.pod, running.folder
        names = pod.uname
        if pod.subdomain and not pod.spec.get("hostNetwork"):
            names = f"{pod.hostname}.{pod.subdomain}.{_DOMAIN}\t{pod.hostname}"
        (folder / "hosts").write_text(
            "# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n"
            "::1\tlocalhost ip6-localhost ip6-loopback\n"
            f"{running.address}\t{names}\n"
        )
        domains = f"{_DOMAIN} svc.cluster.local cluster.local"
        (folder / "resolv.conf").write_text(f"search {domains}\nnameserver {_DNS}\noptions ndots:5\n")

    def _mounts(self, running: Running) -> list[str]:
        """Shell commands that mount what the container sees, below the working directory."""
        pod, folder = running.pod, running.folder
        seen = {"/etc/hosts": folder / "hosts", "/etc/resolv.conf": folder / "resolv.conf", "/app": self.app}
        seen |= {str(path): path for path in (ROOT, Path(sys.prefix), Path(sys.base_prefix), self._bin)}
        volumes = {volume["name"]: volume for volume in pod.spec.get("volumes", [])}
        commands = []
        for mount in pod.container.get("volumeMounts", []):
            volume = volumes.get(mount["name"], {})
            if mount["name"] in pod.folders:
                seen[mount["mountPath"]] = pod.folders[mount["name"]]
            elif "secret" in volume:
                seen[mount["mountPath"]] = self._secret_files(volume["secret"], folder / mount["name"])
            else:  # in memory, or a claim
                size = volume.get("emptyDir", {}).get("sizeLimit", "1Gi").removesuffix("i")
                path = mount["mountPath"]
                commands.append(f"mkdir -p .{path}; mount -t tmpfs -o size={size} volume .{path}")
        for path, source in seen.items():
            make = "mkdir -p" if source.is_dir() else "true"
            commands.append(f"{make} .{path}; mount --bind {source} .{path}")
        return commands

    def _secret_files(self, volume: Mapping[str, Any], folder: Path) -> Path:
        folder.mkdir(exist_ok=True)
        for key, value in self.secrets[volume["secretName"]].items():
            (folder / key).write_text(value)
            (folder / key).chmod(volume.get("defaultMode", 0o644))
        return folder


def _expanded(variables: Mapping[str, str], text: str) -> str:
    """$(NAME) as Kubernetes replaces it: by a variable that is known by then, and else not at all."""
    return re.sub(r"\$\((\w+)\)", lambda match: variables.get(match[1], match[0]), text)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()  # unshare takes its child along, and that all of its namespace
    process.wait()


def _ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=True)


def _listens(namespace: str) -> bool:
    command = ["ip", "netns", "exec", namespace, "ss", "-Hlun", f"src {_DNS}"]
    return bool(subprocess.run(command, capture_output=True, text=True).stdout.strip())
