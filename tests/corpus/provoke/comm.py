"""The network and the rendezvous themselves: ports, names, interfaces, peers that never come."""

from __future__ import annotations

import socket

from tests.corpus.provoke.cases import NETWORK, NETWORK_SETUP, TOOLCHAIN, case
from tests.corpus.provoke.scripts import ddp, engine, zero
from tests.corpus.provoke.workbench import Workbench, free_port


@case("torchrun-master-port-in-use", NETWORK_SETUP)
def port_in_use(bench: Workbench) -> None:
    """Another program listens on the master port"""
    bench.script("train.py", ddp())
    with socket.socket() as squatter:
        squatter.bind(("0.0.0.0", 29517))
        squatter.listen()
        bench.torchrun("train.py", options=["--master-addr=127.0.0.1", "--master-port=29517"])


@case("deepspeed-master-port-in-use", NETWORK_SETUP)
def deepspeed_port_in_use(bench: Workbench) -> None:
    """The same under the deepspeed launcher"""
    bench.json("ds_config.json", **zero(1))
    bench.script("train.py", engine())
    with socket.socket(socket.AF_INET6) as squatter:
        squatter.bind(("::", 29518))
        squatter.listen()
        bench.deepspeed(
            "train.py", "--deepspeed", "--deepspeed_config", "ds_config.json", options=["--master_port=29518"]
        )


def _by_hand(bench: Workbench, rank: int, **env: str) -> None:
    env = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"} | env
    bench.python("train.py", env={"MASTER_PORT": str(free_port())} | env)


@case("master-addr-cannot-be-resolved", NETWORK_SETUP)
def unknown_master(bench: Workbench) -> None:
    """MASTER_ADDR is a name that nobody knows"""
    bench.script("train.py", ddp(timeout=12))
    _by_hand(bench, 1, MASTER_ADDR="gpu-node-00.cluster.invalid")


@case("nobody-listens-on-the-master", NETWORK)
def no_master(bench: Workbench) -> None:
    """Rank 1 comes to the rendezvous, rank 0 never does"""
    bench.script("train.py", ddp(timeout=10))
    _by_hand(bench, 1)


@case("only-one-of-two-nodes-joined", NETWORK)
def lonely_master(bench: Workbench) -> None:
    """Rank 0 waits for the other node, which never comes"""
    bench.script("train.py", ddp(timeout=10))
    _by_hand(bench, 0)


@case("torchrun-rendezvous-timeout-c10d", NETWORK)
def rendezvous_timeout(bench: Workbench) -> None:
    """torchrun's c10d rendezvous: one of two nodes comes"""
    bench.script("train.py", ddp())
    port = free_port()
    bench.torchrun(
        "train.py",
        options=[
            "--nnodes=2",
            "--rdzv-backend=c10d",
            "--rdzv-id=job1",
            f"--rdzv-endpoint=127.0.0.1:{port}",
            "--rdzv-conf=join_timeout=8,last_call_timeout=2",
        ],
    )


@case("torchrun-rendezvous-endpoint-unreachable", NETWORK)
def rendezvous_unreachable(bench: Workbench) -> None:
    """torchrun's second node cannot connect to the endpoint"""
    bench.script("train.py", ddp())
    bench.torchrun(
        "train.py",
        options=[
            "--nnodes=2",
            "--node-rank=1",
            "--rdzv-backend=c10d",
            "--rdzv-id=job1",
            f"--rdzv-endpoint=127.0.0.1:{free_port()}",
            "--rdzv-conf=is_host=0,timeout=8,join_timeout=8",
        ],
        seconds=240,
    )


@case("gloo-interface-does-not-exist", NETWORK_SETUP)
def wrong_interface(bench: Workbench) -> None:
    """GLOO_SOCKET_IFNAME names an interface of another machine"""
    bench.script("train.py", ddp())
    bench.torchrun("train.py", env={"GLOO_SOCKET_IFNAME": "ib0"})


@case("no-route-to-the-master", NETWORK_SETUP)
def no_route(bench: Workbench) -> None:
    """In a network namespace without any interface, the master's address is unreachable"""
    bench.script("train.py", ddp(timeout=10))
    env = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.4", "MASTER_PORT": "29500"}
    bench.run("unshare", "-n", "bash", "-c", "exec python train.py", env=env)


@case("deepspeed-host-not-reachable-via-ssh", NETWORK_SETUP)
def no_ssh_login(bench: Workbench) -> None:
    """Two nodes in the hostfile, and ssh does not get into the first"""
    bench.json("ds_config.json", **zero(1))
    bench.script("train.py", engine())
    bench.script("hostfile", "node-1 slots=2\nnode-2 slots=2\n")
    bench.run("deepspeed", "--hostfile", "hostfile", "train.py", "--deepspeed_config", "ds_config.json")


@case("deepspeed-pdsh-is-not-installed", TOOLCHAIN)
def no_pdsh(bench: Workbench) -> None:
    """Two nodes in the hostfile and no pdsh on this one"""
    bench.json("ds_config.json", **zero(1))
    bench.script("train.py", engine())
    bench.script("hostfile", "node-1 slots=2\nnode-2 slots=2\n")
    options = ["--hostfile", "hostfile", "--no_ssh_check", "--master_addr", "10.0.0.4"]
    bench.run("deepspeed", *options, "train.py", "--deepspeed_config", "ds_config.json")


@case("deepspeed-ssh-to-a-node-fails", NETWORK_SETUP)
def no_ssh(bench: Workbench) -> None:
    """The hostfile names a node whose name ssh cannot resolve"""
    bench.json("ds_config.json", **zero(1))
    bench.script("train.py", engine())
    bench.script("hostfile", "node-1.invalid slots=2\nnode-2.invalid slots=2\n")
    bench.run(
        "deepspeed", "--hostfile", "hostfile", "--no_ssh_check", "train.py", "--deepspeed_config", "ds_config.json"
    )


@case("ray-head-cannot-be-reached", NETWORK)
def no_ray_head(bench: Workbench) -> None:
    """ray.init with the address of a head that is gone"""
    bench.script(
        "launch_ray.py",
        """
        import ray

        ray.init(address="127.0.0.1:6391")
        print(ray.cluster_resources())
        """,
    )
    bench.python(
        "launch_ray.py",
        env={"RAY_gcs_rpc_server_connect_timeout_s": "3", "RAY_gcs_server_request_timeout_seconds": "3"},
        seconds=300,
    )
