"""Every kind of ``REDIS_URL``: plain, with a password, over TLS, behind Sentinel, over a socket."""

from __future__ import annotations

import datetime
import ipaddress
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from support import handlers, processes
from support.app import forget_connections
from support.waiting import until

from db.urls import SettingsError
from tasks import broker


def test_password_is_not_shown() -> None:
    found = broker.of("redis://:s3cret@host:6379/0")
    assert "s3cret" not in repr(found)
    assert found.url == "redis://:s3cret@host:6379/0"


def test_tls_checks_certificates_unless_told_otherwise() -> None:
    assert broker.of("rediss://host/0").url == "rediss://host/0?ssl_cert_reqs=required"
    lax = "rediss://host/0?ssl_cert_reqs=none"
    assert broker.of(lax).url == lax


def test_socket_of_the_embedded_server_is_left_as_it_is() -> None:
    url = "redis+socket:///tmp/home/sockets/valkey.sock"
    assert broker.of(url).url == url


def test_sentinel_names_its_master() -> None:
    found = broker.of("sentinel://:pw@a:26379;sentinel://b:26379/1?master_name=mine")
    assert found.url == "sentinel://:pw@a:26379;sentinel://b:26379/1"
    assert found.options["master_name"] == "mine"
    for wrong in ("sentinel://a:26379/0", "redis://a:6379/0?master_name=mine"):
        with pytest.raises(SettingsError, match="master_name=mymaster"):
            broker.of(wrong)


def test_higher_priority_is_the_lower_number() -> None:
    assert [broker.message_priority(priority) for priority in (0, 5, 9)] == [9, 4, 0]


def test_a_received_wake_up_tells_the_priority_of_its_run() -> None:
    for priority in range(10):
        assert broker.run_priority(broker.message_priority(priority)) == priority
    assert [broker.run_priority(number) for number in (None, -1, 10, "4")] == [0] * 4


@pytest.fixture
def on_broker(
    environment: dict[str, str], configure: Callable[..., Any]
) -> Iterator[Callable[[str], Any]]:
    """The app of this process with another ``REDIS_URL``."""

    def use(url: str) -> Any:
        configure(**environment | {"REDIS_URL": url})
        from tasks import app

        forget_connections()
        return app

    yield use
    forget_connections()


def run_everything(worker: Any, job: Any, url: str) -> None:
    """A run and an ordinary task, through a worker on the same broker."""
    from tasks import trigger

    job("noop")
    with worker(pool="solo", REDIS_URL=url):
        assert trigger.delay("noop", result=1).get(timeout=20) == 1
        assert handlers.add.delay(1, 2).get(timeout=20) == 3


def test_password_in_the_url(
    worker: Any, job: Any, on_broker: Any, own_redis: Any, tmp_path: Path
) -> None:
    with own_redis.client() as client:
        client.config_set("requirepass", "s3cret/with:signs")
    url = f"redis://:s3cret%2Fwith%3Asigns@127.0.0.1:{own_redis.port}/0"
    on_broker(url)
    run_everything(worker, job, url)
    assert "s3cret" not in (tmp_path / "worker-w.log").read_text()


def test_tls(worker: Any, job: Any, on_broker: Any, tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    port = processes.free_port()
    command = [processes.redis_program(), "--port", "0", "--tls-port", str(port), "--save", "",
               "--tls-cert-file", str(certificate), "--tls-key-file", str(key),
               "--tls-auth-clients", "no", "--dir", str(tmp_path)]  # fmt: skip
    server = processes.start(command, tmp_path / "tls.log")
    try:
        client = redis.Redis(port=port, ssl=True, ssl_ca_certs=str(certificate))
        until("Redis to answer", lambda: answers(client) or server.process.poll() is not None)
        if server.process.poll() is not None:
            pytest.skip("this Redis is built without TLS")
        url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificate}"
        on_broker(url)
        run_everything(worker, job, url)
    finally:
        server.end()


def test_sentinel(worker: Any, job: Any, on_broker: Any, own_redis: Any, tmp_path: Path) -> None:
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("needs redis-server, which can be a sentinel")
    port = processes.free_port()
    configuration = tmp_path / "sentinel.conf"
    configuration.write_text(
        f"port {port}\ndir {tmp_path}\nsentinel monitor mine 127.0.0.1 {own_redis.port} 1\n"
    )
    sentinel = processes.start([program, str(configuration), "--sentinel"], tmp_path / "s.log")
    try:
        until("the sentinel to answer", lambda: answers(redis.Redis(port=port)))
        url = f"sentinel://127.0.0.1:{port}/0?master_name=mine"
        on_broker(url)
        run_everything(worker, job, url)
    finally:
        sentinel.end()


def answers(client: redis.Redis) -> bool:
    try:
        with client:
            return bool(client.ping())
    except redis.RedisError:
        return False


def self_signed(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that is its own authority, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "cert.pem", folder / "key.pem"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
    )
    return paths
