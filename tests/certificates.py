"""Certificates for tests of TLS, made with the openssl command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def make_certificate(folder: Path, name: str, days: int = 30) -> dict[str, str]:
    """An authority of this name, and a certificate that it signed, good for so many days: paths by the keys of the
    `tls` section.

    Skips the test where there is no openssl.
    """
    if shutil.which("openssl") is None:
        pytest.skip("certificates are made with the openssl command, which is not here")
    ca, ca_key, key, request, made = (
        str(folder / f"{name}.{part}") for part in ("ca", "cakey", "key", "csr", "crt")
    )
    authority = ("req", "-x509", *KEY, "-keyout", ca_key, "-out", ca, "-subj", f"/CN={name} authority")
    asked = ("req", *KEY, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
    signed = (
        "x509",
        "-req",
        "-in",
        request,
        "-CA",
        ca,
        "-CAkey",
        ca_key,
        "-CAcreateserial",
        "-days",
        str(days),
        "-out",
        made,
    )
    for command in (authority, asked, signed):
        subprocess.run(["openssl", *command], check=True, capture_output=True)
    return {"certificate": made, "key": key, "authority": ca}
