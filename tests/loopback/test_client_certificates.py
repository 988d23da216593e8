"""Relays and publishers that ask for client certificates: who comes in, what others are told."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, ExtensionOID, NameOID

import kvcs
from kvcs.cli.certs import make_certificates, make_client_certificate
from kvcs.errors import CertificateError, FileError, UsageError
from kvcs.quic.aioquic_backend import AioquicListener
from kvcs.relay.server import Relay, RelaySettings
from tests.certificates import DAY, Certified, PemFiles, make_ca
from tests.loopback.recorder import Recorder, Server, connect, end
from tests.loopback.recorder import serve as _serve

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

CLIENT, SERVER = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH
NOW = datetime.datetime.now(datetime.UTC)


def certify(
    issuer: Certified,
    *,
    purposes: tuple[x509.ObjectIdentifier, ...] = (CLIENT,),
    ca: bool = False,
    start: datetime.datetime = NOW - DAY,
    end: datetime.datetime = NOW + DAY,
    name: str = "a client",
    signs: bool = True,
    key: Any = None,
    further: x509.ExtensionType | None = None,
) -> Certified:
    """A certificate of ``issuer``."""
    key = ec.generate_private_key(ec.SECP256R1()) if key is None else key
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(issuer.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
    )
    if purposes:
        builder = builder.add_extension(x509.ExtendedKeyUsage(list(purposes)), critical=False)
    if further is not None:
        builder = builder.add_extension(further, critical=False)
    if ca:
        usage = x509.KeyUsage(not signs, False, False, False, False, signs, False, False, False)
        builder = builder.add_extension(usage, critical=True)
    return Certified(builder.sign(issuer.key, hashes.SHA256()), key)


def deep_ca() -> Certified:
    """An authority that lets others certify, too."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "root")])
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(NOW - DAY)
        .not_valid_after(NOW + DAY)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    )
    return Certified(builder.sign(key, hashes.SHA256()), key)


SHORT, LONG = (rsa.generate_private_key(65537, bits) for bits in (1024, 2048))
EDWARDS = ed25519.Ed25519PrivateKey.generate()
ROOT, STRANGER = deep_ca(), make_ca("a stranger")
TWIN = Certified(ROOT.certificate, STRANGER.key)
"""Somebody who calls itself the authority and has not its key."""
BETWEEN = certify(ROOT, ca=True, purposes=(), name="between")
NO_SIGNER = certify(ROOT, ca=True, purposes=(), name="no signer", signs=False)
X400_NAME = x509.UnrecognizedExtension(
    ExtensionOID.SUBJECT_ALTERNATIVE_NAME, b"\x30\x04\xa3\x02\x30\x00"
)
"""Alternative names of a kind that the library does not read."""
ORDINARY = certify(ROOT)
OLD = certify(ROOT, ca=True, purposes=(), end=NOW - DAY / 2, name="old")


@dataclass(frozen=True)
class Case:
    """What a client shows, and what it gets."""

    name: str
    leaf: Callable[[], Certified]
    chain: tuple[Certified, ...] = ()
    alert: str = ""

    def __str__(self) -> str:
        return self.name


CASES = [
    Case("of the authority", lambda: certify(ROOT)),
    Case("for both purposes", lambda: certify(ROOT, purposes=(SERVER, CLIENT))),
    Case("through an intermediate", lambda: certify(BETWEEN), (BETWEEN,)),
    Case("without the intermediate", lambda: certify(BETWEEN), (), "unknown_ca"),
    Case("of a stranger", lambda: certify(STRANGER), (), "unknown_ca"),
    Case("of a stranger, root sent", lambda: certify(STRANGER), (STRANGER,), "unknown_ca"),
    Case("forged in the authority's name", lambda: certify(TWIN), (), "unknown_ca"),
    Case("signed by a client", lambda: certify(ORDINARY), (ORDINARY,), "unknown_ca"),
    Case("of one that may not sign", lambda: certify(NO_SIGNER), (NO_SIGNER,), "unknown_ca"),
    Case("of an old intermediate", lambda: certify(OLD), (OLD,), "unknown_ca"),
    Case("expired", lambda: certify(ROOT, end=NOW - DAY / 2), (), "certificate_expired"),
    Case("not valid yet", lambda: certify(ROOT, start=NOW + DAY / 2), (), "certificate_expired"),
    Case("for servers", lambda: certify(ROOT, purposes=(SERVER,)), (), "unsupported_certificate"),
    Case("without a purpose", lambda: certify(ROOT, purposes=()), (), "unsupported_certificate"),
    Case("with a short key", lambda: certify(ROOT, key=SHORT), (), "unsupported_certificate"),
    Case("with a key of Ed25519", lambda: certify(ROOT, key=EDWARDS)),
    Case("with a key of RSA", lambda: certify(ROOT, key=LONG)),
    Case("with too long a chain", lambda: certify(ROOT), (BETWEEN,) * 9, "bad_certificate"),
    Case("of no known form", lambda: certify(STRANGER, further=X400_NAME), (), "bad_certificate"),
]


@dataclass(frozen=True)
class Shown:
    """Files of a client."""

    cert: Path
    key: Path

    @property
    def options(self) -> dict[str, Path]:
        """Arguments of `kvcs.connect`."""
        return {"client_cert": self.cert, "client_key": self.key}


def write(folder: Path, leaf: Certified, *chain: Certified) -> Shown:
    """Write a client's files."""
    shown = Shown(folder / "client.pem", folder / "client.key")
    shown.cert.write_bytes(b"".join(each.certificate_pem for each in (leaf, *chain)))
    shown.key.write_bytes(leaf.key_pem)
    return shown


async def serve(files: PemFiles, ca: Path | bytes = ROOT.certificate_pem) -> Server:
    """Listen for clients with certificates of ``ca``."""
    return await _serve(files, client_ca=ca)


def refusals(listener: AioquicListener) -> dict[str, int]:
    """How many clients were refused, by alert."""
    assert listener.clients is not None
    return listener.clients.refused


async def outcome(client: Recorder) -> str:
    """The alert with which the server ended a connection."""
    code, reason, by_peer = await client.until_closed()
    assert (code, by_peer) == (None, True)
    text, _, alert = reason.partition(" (")
    assert text == "the peer refuses this side's certificate"
    return str(alert.partition(":")[0])


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_a_certificate_counts_by_authority_dates_and_purpose(
    files: PemFiles, tmp_path: Path, case: Case
) -> None:
    server = await serve(files)
    shown = write(tmp_path, case.leaf(), *case.chain)
    client = await connect(server, cert=shown.cert, key=shown.key)
    if not case.alert:
        await server.receiver()
        assert refusals(server.listener) == {}
    else:
        client.transport.send(2, b"SETUP", False)
        client.transport.flush()
        assert await outcome(client) == case.alert
        assert server.receivers == [], "nothing of the session was looked at"
        assert refusals(server.listener) == {case.alert: 1}
    await end(server, client)


async def test_a_client_without_a_certificate_is_refused(files: PemFiles) -> None:
    server = await serve(files)
    client = await connect(server)
    assert await outcome(client) == "certificate_required"
    assert server.receivers == []
    assert refusals(server.listener) == {"certificate_required": 1}
    await end(server, client)


async def test_a_client_that_has_not_the_key_is_refused(
    files: PemFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await serve(files)
    shown = write(tmp_path, certify(ROOT))
    shown.key.write_bytes(certify(ROOT).key_pem)
    with pytest.raises(FileError, match="does not belong to certificate"):
        await connect(server, cert=shown.cert, key=shown.key)
    # A client that does not look, and signs with what it has.
    monkeypatch.setattr(
        "kvcs.quic.aioquic_backend.certificates._public_octets", lambda key: b"the same"
    )
    client = await connect(server, cert=shown.cert, key=shown.key)
    code, reason, by_peer = await client.until_closed()
    assert (code, by_peer) == (None, True)
    assert "decrypt_error" in reason
    assert server.receivers == []
    assert refusals(server.listener) == {"decrypt_error": 1}
    await end(server, client)


async def test_a_server_that_asks_for_none_takes_everyone(files: PemFiles, tmp_path: Path) -> None:
    server = await _serve(files)
    shown = write(tmp_path, certify(STRANGER))
    clients = [await connect(server), await connect(server, cert=shown.cert, key=shown.key)]
    await server.receiver(1)
    await end(server, *clients)


async def test_a_file_of_authorities_counts_anew_when_it_changes(
    files: PemFiles, tmp_path: Path
) -> None:
    ca = tmp_path / "clients.pem"

    def put(octets: bytes) -> None:
        fresh = tmp_path / "fresh.pem"
        fresh.write_bytes(octets)
        os.replace(fresh, ca)

    put(ROOT.certificate_pem)
    server = await serve(files, ca)
    shown = write(tmp_path, certify(STRANGER))
    first = await connect(server, cert=shown.cert, key=shown.key)
    assert await outcome(first) == "unknown_ca"
    put(ROOT.certificate_pem + STRANGER.certificate_pem)
    second = await connect(server, cert=shown.cert, key=shown.key)
    await server.receiver()
    put(b"no certificate")  # those that were read last go on
    third = await connect(server, cert=shown.cert, key=shown.key)
    await server.receiver(1)
    await end(server, first, second, third)


async def test_what_is_no_authority_is_said_at_once(files: PemFiles, tmp_path: Path) -> None:
    for ca in (tmp_path / "none.pem", b"nothing"):
        with pytest.raises(FileError, match="client_ca"):
            await serve(files, ca)


# By the public interface


@dataclass(frozen=True)
class Site:
    """A relay's files and a client's, of one authority."""

    folder: Path

    @property
    def ca(self) -> Path:
        """The authority of both."""
        return self.folder / "ca.pem"

    @property
    def client(self) -> dict[str, Path]:
        """What a client shows."""
        files = self.folder
        return {
            "client_cert": files / "site-one-cert.pem",
            "client_key": files / "site-one-key.pem",
        }

    def settings(self, **options: object) -> RelaySettings:
        """Of a relay that asks for certificates."""
        files = {"cert": self.folder / "cert.pem", "key": self.folder / "key.pem"}
        asks = {"port": 0, "allow_anyone": True, "client_ca": self.ca, "ca": self.ca}
        return RelaySettings(**{**files, **asks, **options})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """What `kvcs certs` makes."""
    folder = tmp_path_factory.mktemp("site")
    make_certificates(folder, ("localhost", "127.0.0.1"))
    make_client_certificate(folder, "site-one")
    return Site(folder)


async def test_a_relay_takes_clients_with_certificates_alone(site: Site) -> None:
    async with Relay(site.settings()) as relay:
        for shown in ({}, {"client_cert": site.folder / "cert.pem"}):
            options = {**shown, **({"client_key": site.folder / "key.pem"} if shown else {})}
            with pytest.raises(CertificateError, match="--client-cert and --client-key"):
                async with kvcs.connect(relay.url, ca=site.ca, **options):
                    pass
        assert (relay.stats.sessions_total, relay.stats.clients_refused) == (0, 2)
        async with kvcs.connect(relay.url, ca=site.ca, **site.client) as session:
            assert session.is_open
        assert relay.stats.sessions_total == 1


async def test_a_relay_shows_its_certificate_to_an_upstream(site: Site) -> None:
    async with Relay(site.settings()) as upstream:
        chained = site.settings(upstreams=(upstream.url,), client_ca=None, **site.client)
        async with (
            Relay(chained) as relay,
            kvcs.connect(upstream.url, ca=site.ca, **site.client) as producer,
            kvcs.connect(relay.url, ca=site.ca) as consumer,
        ):
            descriptor = kvcs.Descriptor(
                model="tiny",
                weights=kvcs.UNPINNED,
                layers=1,
                kv_heads=1,
                head_dim=4,
                dtype="float16",
                block_tokens=2,
            )
            prefix = kvcs.Prefix(kvcs.Scope(bytes(32)), descriptor, [1, 2])
            array = np.ones((2, 1, 4), np.float16)
            async with kvcs.Publisher(producer).publish(prefix) as publication:
                segment = await publication.segment()
                await segment.put(0, array, array)
                async with kvcs.Subscriber(consumer).open(prefix, deadline=30.0) as cache:
                    layers = [layer.index async for layer in cache]
        assert layers == [0]


async def test_a_listening_publisher_asks_for_certificates_too(site: Site) -> None:
    files = site.settings()
    async with kvcs.serve(
        "127.0.0.1", 0, cert=files.cert, key=files.key, client_ca=site.ca
    ) as server:
        with pytest.raises(CertificateError, match="certificate_required"):
            async with kvcs.connect(server.url, ca=site.ca, reconnect=None):
                pass
        async with kvcs.connect(server.url, ca=site.ca, **site.client) as session:
            assert session.is_open


async def test_a_certificate_needs_its_key(site: Site) -> None:
    [cert, key] = site.client.values()
    for options in ({"client_cert": cert}, {"client_key": key}):
        with pytest.raises(UsageError, match="belong together"):
            async with kvcs.connect("moqt://127.0.0.1:1", ca=site.ca, **options):
                pass
        with pytest.raises(UsageError, match="belong together"):
            site.settings(**options)
    with pytest.raises(FileError, match="does not belong to certificate"):
        async with kvcs.connect(
            "moqt://127.0.0.1:1", ca=site.ca, client_cert=cert, client_key=site.folder / "key.pem"
        ):
            pass
