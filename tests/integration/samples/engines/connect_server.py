"""A Spark Connect server of PySpark's own, in a process of its own on the loopback interface."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pyspark

_HOME = Path(pyspark.__file__).parent
_SETTINGS = {
    "spark.connect.grpc.binding.address": "127.0.0.1",
    "spark.connect.grpc.binding.port": "0",  # any that is free, which it tells
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",  # compiling a query takes longer than a small one
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
}
_STARTED = "Spark Connect server started at: "


@contextmanager
def connect_server() -> Iterator[str]:
    """The address of a server, which is stopped afterwards.

    Raises:
        RuntimeError: it ended before it had started; with what it said.
    """
    settings = [word for name, value in _SETTINGS.items() for word in ("--conf", f"{name}={value}")]
    main = ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"]
    server = subprocess.Popen(
        [_HOME / "bin" / "spark-submit", "--master", "local[2]", *settings, *main],
        env={**os.environ, "SPARK_HOME": str(_HOME), "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert server.stdout is not None
    said: list[str] = []
    reader = Thread(target=said.extend, args=(server.stdout,))  # a full pipe would hold the server up
    try:
        for line in server.stdout:
            said.append(line)
            if _STARTED in line:
                break
        else:
            raise RuntimeError("".join(said[-20:]))
        address = said[-1].partition(_STARTED)[2].strip()
        reader.start()
        yield f"sc://{address}"
    finally:
        server.terminate()
        server.wait(60)
        if reader.ident is not None:
            reader.join()
        server.stdout.close()
