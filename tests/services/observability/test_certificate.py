"""The end of a certificate is read as OpenSSL reads it."""

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest
from epdserve.services.observability.certificate import expires_at, watch_certificate
from prometheus_client import CollectorRegistry


@pytest.mark.parametrize(
    "days", [1, 400, 20_000], ids=lambda days: f"{days}d"
)  # the last one has four digits of year
@pytest.mark.needs("openssl")
def test_the_end_is_that_of_openssl(days: int, tmp_path: Path) -> None:
    cert = tmp_path / "cert.pem"
    command = [
        str(shutil.which("openssl")),
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
    ]
    command += [
        "-nodes",
        "-keyout",
        str(tmp_path / "key.pem"),
        "-out",
        str(cert),
        "-days",
        str(days),
        "-subj",
        "/CN=a",
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    told = subprocess.run(
        ["openssl", "x509", "-noout", "-enddate", "-in", str(cert)],
        check=True,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert expires_at(cert) == ssl.cert_time_to_seconds(told.stdout.strip().partition("=")[2])
    registry = CollectorRegistry()
    watch_certificate(cert, registry)
    assert registry.get_sample_value("epdserve_router_tls_cert_expiry_timestamp_seconds") == expires_at(cert)


def test_what_is_no_certificate_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cert.pem"
    file.write_text("-----BEGIN PRIVATE KEY-----\n")
    with pytest.raises(ValueError, match="no certificate"):
        expires_at(file)
