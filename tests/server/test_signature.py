"""Signatures of exports: who verifies one, what breaks it, and what a server without one says."""

from __future__ import annotations

import datetime
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from launcher_scripts.checkpoint.verification import FILE_NAME, verify_signature
from launcher_scripts.common.errors import CheckpointError, ConfigError
from launcher_scripts.config.security import SigningKey, TrustedSigner
from launcher_scripts.config.settings import DeploySettings
from launcher_scripts.steps import start_server, write_model_repository
from tests.server.repositories import export, export_settings

Key = ec.EllipticCurvePrivateKey


def key_files(folder: Path, name: str) -> tuple[Key, str, str]:
    """A new key, and the paths of its private and its public PEM file."""
    key = ec.generate_private_key(ec.SECP256R1())
    pem, private, public = serialization.Encoding.PEM, folder / name, folder / f"{name}.pub"
    kind, none = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    private.write_bytes(key.private_bytes(pem, kind, none))
    public.write_bytes(
        key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return key, str(private), str(public)


def certificate(folder: Path, name: str, key: Key, signer: Key, *, authority: bool) -> str:
    """The PEM file of a certificate by `ca`, whose key is `signer`."""
    now = datetime.datetime.now(datetime.timezone.utc)
    usage = dict.fromkeys(
        (
            *("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
            *("crl_sign", "encipher_only", "decipher_only"),
        ),
        False,
    )
    usage |= {"digital_signature": not authority, "key_cert_sign": authority}
    made = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ca")]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(authority, None), critical=True)
        .add_extension(x509.KeyUsage(**usage), critical=True)
        .sign(signer, hashes.SHA256())
    )
    path = folder / f"{name}.pem"
    path.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    return str(path)


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A repository that is signed by a key, and the path of the public key."""
    folder = tmp_path_factory.mktemp("signed")
    _, private, public = key_files(folder, "key")
    settings = export(folder, sign=SigningKey(private), overwrite=True)
    write_model_repository.write_repository(settings)
    return settings.model_repository, public


@pytest.fixture
def copied(signed: tuple[Path, str], tmp_path: Path) -> tuple[Path, TrustedSigner]:
    """A copy of the signed repository, elsewhere, and who may sign."""
    return Path(shutil.copytree(signed[0], tmp_path / "copy")), TrustedSigner(signed[1])


def test_a_signature_is_verified_elsewhere(copied: tuple[Path, TrustedSigner]) -> None:
    repository, signer = copied
    compiled = repository / "preprocessing" / "1" / "__pycache__"
    compiled.mkdir()
    (compiled / "model.cpython-311.pyc").write_bytes(b"other code")
    verify_signature(repository, signer)
    assert not compiled.exists()


def test_the_package_itself_verifies_it(copied: tuple[Path, TrustedSigner]) -> None:
    from model_signing import verifying

    repository, signer = copied
    config = verifying.Config().use_elliptic_key_verifier(public_key=signer.public_key)
    config.verify(repository, repository / FILE_NAME)


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


def shard(path: Path) -> None:
    (weight, *_) = path.glob("tiny/1/1-gpu/*.bin")
    content = bytearray(weight.read_bytes())
    content[-1] ^= 1
    weight.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda path: append(path / "tiny" / "config.pbtxt"), "altered: tiny/config.pbtxt"),
        (lambda path: append(path / "text" / "1" / "model.py"), "altered: text/1/model.py"),
        (shard, r"altered: tiny/1/1-gpu/[\w.]+bin"),
        (
            lambda path: append(path / "tiny/1/1-gpu/manifest.json"),
            "altered: tiny/1/1-gpu/manifest.json",
        ),
        (lambda path: (path / "more.py").touch(), "not in the signature: more.py"),
        (lambda path: (path / ".gitignore").touch(), "not in the signature: .gitignore"),
        (lambda path: (path / "tiny" / "config.pbtxt").unlink(), "missing: tiny/config.pbtxt"),
        (lambda path: (path / "link").symlink_to("/etc"), "is not valid: .*link"),
        (lambda path: (path / FILE_NAME).unlink(), "is not signed: no model.sig"),
        (lambda path: (path / FILE_NAME).write_text("{}"), "is not valid"),
    ],
)
def test_what_was_changed_is_one_error(
    copied: tuple[Path, TrustedSigner], change: Callable[[Path], Any], says: str
) -> None:
    repository, signer = copied
    change(repository)
    with pytest.raises(CheckpointError, match=says) as caught:
        verify_signature(repository, signer)
    assert "deploy.verify_signature" in str(caught.value)
    assert "Digest(" not in str(caught.value)


def test_another_key_signs_nothing(copied: tuple[Path, TrustedSigner], tmp_path: Path) -> None:
    _, _, public = key_files(tmp_path, "other")
    with pytest.raises(CheckpointError, match=r"is not valid: .*Key mismatch"):
        verify_signature(copied[0], TrustedSigner(public))


def test_a_certificate_is_verified_by_its_authority(tmp_path: Path) -> None:
    (ca, _, _), (key, private, _) = (key_files(tmp_path, name) for name in ("ca", "signer"))
    authority = certificate(tmp_path, "ca", ca, ca, authority=True)
    own = certificate(tmp_path, "signer", key, ca, authority=False)
    settings = export(tmp_path, sign=SigningKey(private, own, (authority,)), overwrite=True)
    write_model_repository.write_repository(settings)
    verify_signature(settings.model_repository, TrustedSigner(certificates=(authority,)))
    other, _, _ = key_files(tmp_path, "other")
    stranger = certificate(tmp_path, "stranger", other, other, authority=True)
    with pytest.raises(CheckpointError, match="is not valid"):
        verify_signature(settings.model_repository, TrustedSigner(certificates=(stranger,)))


def test_a_draft_model_elsewhere_is_not_signed(copied: tuple[Path, TrustedSigner]) -> None:
    repository, signer = copied
    config = repository / "tiny" / "config.pbtxt"
    text = (
        'parameters {\n  key: "draft_model_checkpoint_path"\n  value: { string_value: "/d" }\n}\n'
    )
    config.write_text(config.read_text() + text)
    with pytest.raises(CheckpointError, match="the draft model of tiny; got '/d'"):
        verify_signature(repository, signer)


def test_without_the_package(
    copied: tuple[Path, TrustedSigner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "model_signing", None)
    with pytest.raises(CheckpointError, match=r"lacks the package model-signing .*sign.txt"):
        verify_signature(*copied)


def test_a_server_does_not_start(
    copied: tuple[Path, TrustedSigner], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repository, signer = copied
    append(repository / "tiny" / "config.pbtxt")
    values = {
        "model_repository": str(repository),
        "results_dir": str(tmp_path / "results"),
        "verify_signature": {"public_key": signer.public_key},
    }
    file = tmp_path / "settings.yaml"
    file.write_text(yaml.safe_dump(values))
    assert start_server.main(["--settings", str(file)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("the signature of") and error.count("\n") == 1
    assert "altered: tiny/config.pbtxt;" in error
    assert not (tmp_path / "results").exists()


def test_settings_that_cannot_be_met(tmp_path: Path) -> None:
    for values in ({}, {"public_key": "a", "certificates": ("b",)}):
        with pytest.raises(ConfigError, match="by a public key or by certificates"):
            TrustedSigner(**values)
    with pytest.raises(ConfigError, match="a chain needs the certificate"):
        export_settings(tmp_path, sign=SigningKey("key", chain=("ca.pem",)))
    with pytest.raises(ConfigError, match="only where the repository is a folder"):
        DeploySettings("s3://bucket/models", "results", verify_signature=TrustedSigner("key.pub"))
