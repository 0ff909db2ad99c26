"""A server that speaks S3 and checks signatures, in a process of its own, and a bad line to it."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import boto3

BUCKET = "team"
USERS = {"host": ["s3:*"], "writer": ["s3:Get*", "s3:List*", "s3:Put*"], "reader": ["s3:Get*", "s3:List*"]}
_FREE_CALLS = 3 * len(USERS) + 1  # before the server asks for a signature: those below


@dataclass(frozen=True)
class Server:
    """Where it is, and who may use it: user -> key and secret."""

    port: int
    keys: dict[str, tuple[str, str]]

    @property
    def secret(self) -> str:
        """That of the user who may do everything."""
        return self.keys["host"][1]

    def environment(self, port: int | None = None, user: str = "host") -> dict[str, str]:
        """What a host needs to use it, over another port if one is named; nothing of the user's own."""
        key, secret = self.keys[user]
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port or self.port}",
            "AWS_ACCESS_KEY_ID": key,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }


@contextmanager
def serve() -> Iterator[Server]:
    """A running server with USERS and the empty bucket BUCKET."""
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
        env=os.environ | {"INITIAL_NO_AUTH_ACTION_COUNT": str(_FREE_CALLS)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        port = next(int(found[1]) for line in process.stderr if (found := re.search(r"//[\d.]+:(\d+)", line)))
        threading.Thread(target=process.stderr.read, daemon=True).start()  # a full pipe would stop it
        account = {"aws_access_key_id": "any", "aws_secret_access_key": "any", "region_name": "us-east-1"}
        account["endpoint_url"] = f"http://127.0.0.1:{port}"
        keys = {user: _make_user(boto3.client("iam", **account), user) for user in USERS}
        boto3.client("s3", **account).create_bucket(Bucket=BUCKET)
        yield Server(port, keys)
    finally:
        process.kill()
        process.wait()


def _make_user(iam: Any, user: str) -> tuple[str, str]:
    allowed = {"Effect": "Allow", "Action": USERS[user], "Resource": "*"}
    iam.create_user(UserName=user)
    made = iam.create_access_key(UserName=user)["AccessKey"]
    policy = json.dumps({"Version": "2012-10-17", "Statement": allowed})
    iam.put_user_policy(UserName=user, PolicyName="own", PolicyDocument=policy)
    return made["AccessKeyId"], made["SecretAccessKey"]


class Line:
    """A TCP proxy to a port. After `limit` bytes in one direction it cuts the connection or lets it hang."""

    def __init__(self, target: int) -> None:
        self.reached = threading.Event()  # set once the limit is
        self._target, self._ended, self._lock = target, threading.Event(), threading.Lock()
        self._left: dict[str, float] = {"up": float("inf"), "down": float("inf")}
        self._once = self._hangs = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def limit(self, direction: str, size: int, once: bool = False, hangs: bool = False) -> None:
        """After so many bytes `up` or `down` connections break, `once` or for ever after."""
        self._once, self._hangs = once, hangs
        self._left[direction] = size

    def close(self) -> None:
        """Stop listening and let go of what hangs."""
        self._ended.set()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                for direction, source, sink in (("up", near, far), ("down", far, near)):
                    threading.Thread(target=self._carry, args=(direction, source, sink), daemon=True).start()

    def _carry(self, direction: str, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(2**16):
                passed = self._take(direction, len(data))
                sink.sendall(data[:passed])
                if passed < len(data):
                    self.reached.set()
                    if self._hangs:
                        self._ended.wait()
                    break
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _take(self, direction: str, wanted: int) -> int:
        with self._lock:
            passed = int(min(wanted, self._left[direction]))
            self._left[direction] -= passed
            if passed < wanted and self._once:
                self._left[direction] = float("inf")
            return passed
