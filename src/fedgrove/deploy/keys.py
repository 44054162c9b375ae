"""A certificate for the server and a key for each node, so that known devices meet over TLS.

::

    ca.key        signs certificates: keep it off line
    ca.crt        goes to every node, and to whoever starts runs
    server.key    the server's, with server.crt
    server.crt
    node-0        a node's private key: goes to that node and nowhere else
    node-0.pub    registered with the server
    partitions.toml   which clients the node with a key may be: node-0 = [0]
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from ..errors import InputError, check

LOCAL = ("localhost", "127.0.0.1")
"""The hosts that every server certificate is for."""
DAYS = 825
"""How long certificates are valid: the longest that common clients accept."""
MOST_NODES = 10_000
NODES = 3
DECLARED = "partitions.toml"
"""The file that declares which clients the node with a key may be."""
DECLARED_HEAD = """# The clients that a node may be: name of the .pub file of its key = clients.
# A run whose app names this folder (keys) reads the file when it starts.
"""


@dataclass(frozen=True)
class DeclaredKey:
    """The name of a node's public key, and the clients that the node may be."""

    name: str
    partitions: tuple[int, ...]


@dataclass(frozen=True)
class Keys:
    """What was made: the folder, the hosts of the certificate, the names of the nodes' keys."""

    folder: Path
    hosts: tuple[str, ...]
    nodes: tuple[str, ...]

    @property
    def host(self) -> str:
        """The host by which nodes find the server: one that was named, else this machine."""
        return self.hosts[len(LOCAL)] if len(self.hosts) > len(LOCAL) else LOCAL[1]


def make_keys(folder: str | Path, nodes: int = NODES, hosts: Sequence[str] = ()) -> Keys:
    """Make a CA, a server certificate for ``hosts``, and authentication keys for the nodes.

    The folder becomes readable for the user only, and nothing is overwritten: a folder that has any
    files is refused.
    """
    check(1 <= nodes <= MOST_NODES, "nodes", nodes, f"1 to {MOST_NODES}")
    if find_spec("cryptography") is None:
        raise InputError(
            "keys are made with cryptography, which comes with Flower, and it is not installed; "
            "get it with: pip install 'fedgrove[flower]'"
        )
    path = Path(folder)
    # Each host once, in the order given: the first one that was named is shown to the user.
    all_hosts = tuple(dict.fromkeys((*LOCAL, *map(_checked, hosts))))
    try:
        _check_free(path, nodes)
        # Only the user may list it: it holds private keys.
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        # A folder that was there, or whatever the umask of the user.
        path.chmod(0o700)
        return _make(path, nodes, all_hosts)
    except FileExistsError as error:
        raise InputError(
            f"{error.filename or path} exists, and is not overwritten; give a folder that is empty "
            "or does not exist."
        ) from None
    except OSError as error:
        raise InputError(
            f"{error.filename or path} cannot be written: {error.strerror or error}."
        ) from None


def _checked(host: str) -> str:
    is_name = bool(host) and all(letter.isalnum() or letter in "-.:_*" for letter in host)
    allowed = "a name or an address without a port, such as fl.example.org or 10.0.0.5"
    # An IPv6 address has two colons or more.
    looks_like_port = host.count(":") == 1
    check(is_name and not looks_like_port and host.isascii(), "--host", host, allowed)
    return host


def _check_free(path: Path, nodes: int) -> None:
    """Refuse a folder with files, whose rights would change."""
    files = [path / name for name in ("ca.key", "ca.crt", "server.key", "server.crt", DECLARED)]
    present = list(filter(Path.exists, files))
    names = _name_nodes(nodes)
    taken = [path / name for name in names if (path / name).exists()]
    if present:
        # A new authority would shut out every node that trusts the old one.
        named = ", ".join(map(str, (*present, *taken)))
        raise InputError(
            f"{named}: already exists, and is never overwritten; give a different folder. To add a "
            "node, make a key for it: ssh-keygen -t ecdsa -b 384 -N '' -f NODE"
        )
    if taken:
        raise InputError(
            f"{taken[0]} already exists, and is never overwritten; give a different folder."
        )
    if path.is_dir() and any(path.iterdir()):
        raise InputError(
            f"{path} contains other files, and a folder of keys is readable for its user only; "
            "give an empty or a new folder."
        )


def _name_nodes(nodes: int) -> tuple[str, ...]:
    return tuple(f"node-{number}" for number in range(nodes))


def _make(path: Path, nodes: int, hosts: tuple[str, ...]) -> Keys:
    names = _name_nodes(nodes)
    _write_certificates(path, hosts)
    lines = [DECLARED_HEAD]
    for partition, name in enumerate(names):
        _write_node_key(path / name)
        lines.append(f"{name} = [{partition}]\n")
    _write(path / DECLARED, "".join(lines).encode())
    return Keys(path, hosts, names)


def _write_certificates(path: Path, hosts: tuple[str, ...]) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    authority = ec.generate_private_key(ec.SECP384R1())
    server = ec.generate_private_key(ec.SECP384R1())
    issuer = _name("fedgrove CA")
    root = _certificate(issuer, issuer, authority.public_key(), is_ca=True)
    root = root.add_extension(
        x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False
    )
    alternatives: list[Any] = []
    for host in hosts:
        try:
            # TLS looks for an address among the addresses only: as a name it would
            # never match.
            alternatives.append(x509.IPAddress(ip_address(host)))
        except ValueError:
            alternatives.append(x509.DNSName(host))
    # The name must be short; clients look at the alternatives.
    leaf = _certificate(_name("fedgrove server"), issuer, server.public_key(), is_ca=False)
    leaf = leaf.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    leaf = leaf.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False
    )
    from cryptography.hazmat.primitives import hashes, serialization

    pem = serialization.Encoding.PEM
    _write(path / "ca.key", _pem_of(authority))
    _write(path / "ca.crt", root.sign(authority, hashes.SHA384()).public_bytes(pem))
    _write(path / "server.key", _pem_of(server))
    _write(path / "server.crt", leaf.sign(authority, hashes.SHA384()).public_bytes(pem))


def _name(text: str) -> Any:
    """Return the subject of a certificate."""
    from cryptography import x509

    return x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, text)])


def _certificate(subject: Any, issuer: Any, key: Any, is_ca: bool) -> Any:
    from cryptography import x509

    now = datetime.now(UTC)
    # No further authority below it: a stolen certificate cannot issue others.
    path_length = 0 if is_ca else None
    usage = x509.KeyUsage(
        # The authority may only sign certificates, the server only prove who it is.
        digital_signature=not is_ca,
        key_cert_sign=is_ca,
        crl_sign=is_ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        # Clocks of devices may be a little behind.
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=DAYS))
        .add_extension(x509.BasicConstraints(is_ca, path_length), critical=True)
        .add_extension(usage, critical=True)
    )
    if is_ca:
        return builder
    server_use = x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH])
    return builder.add_extension(server_use, critical=False)


def _write_node_key(path: Path) -> None:
    """An elliptic-curve key as ssh-keygen writes it, which is how Flower reads it."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    _write(path, private)
    _write(path.with_name(f"{path.name}.pub"), public + b"\n")


def read_public_key(path: Path) -> tuple[bytes, Any] | None:
    """Return a node's public key as Flower sends it, and the key; None if the file has none."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key = serialization.load_ssh_public_key(path.read_bytes())
    except (ValueError, OSError):
        return None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        return None
    name = key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return name, key


def read_declared_keys(folder: str | Path) -> dict[bytes, DeclaredKey]:
    """Return which clients the node with each public key may be, by what Flower sends of the key.

    Raises:
        InputError: ``partitions.toml`` or a public key that it names cannot be read.
    """
    path = Path(folder).absolute() / DECLARED
    example = "one line for each key, as: node-0 = [0]"
    try:
        declared = tomllib.loads(path.read_text())
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {error.strerror or error}; fedgrove keys writes it, with "
            f"{example}."
        ) from None
    except ValueError as error:
        raise InputError(f"{path} is not TOML: {error}; it must have {example}.") from None
    found = {}
    for name, partitions in declared.items():
        are_numbers = isinstance(partitions, list) and all(
            type(each) is int and each >= 0 for each in partitions
        )
        check(are_numbers, f"{name} in {path}", partitions, "a list of clients, such as [0]")
        read = read_public_key(path.with_name(f"{name}.pub"))
        if read is None:
            raise InputError(
                f"{path} names {name}, and {path.with_name(name)}.pub is not the public key of a "
                "node; put the file there, or remove the line."
            )
        found[read[0]] = DeclaredKey(name, tuple(partitions))
    return found


def _pem_of(key: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization

    data: bytes = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return data


def _write(path: Path, data: bytes) -> None:
    """Write a new file that nobody else can read, from its first byte on."""
    # O_EXCL: a file that appears after the check above is not overwritten either.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        # Whatever the umask of the user.
        with suppress(OSError):
            os.fchmod(descriptor, 0o600)
        file.write(data)
