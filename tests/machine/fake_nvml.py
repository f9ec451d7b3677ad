"""NVIDIA's libnvidia-ml.so.1 for machines without a GPU: C, compiled, answering as a driver."""

import ctypes
import shutil
import subprocess

import pynvml
import pytest

SOURCE = r"""
#include <string.h>
#include <unistd.h>
static const char *names[] = {NAMES}, *uuids[] = {UUIDS};
static const unsigned long long mib[][2] = {MIB};  /* total, free; 0 where a GPU has none */
enum {COUNT = sizeof mib / sizeof *mib, BAD_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6};
typedef struct {unsigned long long total, free, used;} Memory;

int nvmlInitWithFlags(unsigned flags) {sleep(SECONDS); return INIT;}
int nvmlShutdown(void) {return 0;}
int nvmlDeviceGetCount_v2(unsigned *count) {*count = COUNT; return 0;}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **gpu) {
  *gpu = (void *)&mib[index];
  return index < COUNT ? 0 : BAD_ARGUMENT;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **gpu) {
  for (unsigned i = 0; i < COUNT; i++)
    if (!strcmp(uuid, uuids[i])) return nvmlDeviceGetHandleByIndex_v2(i, gpu);
  return NOT_FOUND;
}
int nvmlDeviceGetIndex(void *gpu, unsigned *index) {
  *index = (unsigned long long (*)[2])gpu - mib;
  return 0;
}
int nvmlDeviceGetName(void *gpu, char *text, unsigned size) {
  unsigned index;
  nvmlDeviceGetIndex(gpu, &index);
  strcpy(text, names[index]);
  return 0;
}
int nvmlDeviceGetMemoryInfo(void *gpu, Memory *memory) {
  const unsigned long long *of = gpu;
  memory->total = of[0] << 20, memory->free = of[1] << 20, memory->used = (of[0] - of[1]) << 20;
  return of[0] ? 0 : NOT_SUPPORTED;
}
"""


def build(folder, *gpus, init=0, seconds=0):
    """The path of the library.

    Args:
        folder: where it is made; for LD_LIBRARY_PATH.
        gpus: (name, UUID, MiB, free MiB) of each; 0 MiB for a GPU without memory of its own.
        init: what nvmlInit returns, an NVML_ERROR_*.
        seconds: that nvmlInit takes.
    """
    compiler = shutil.which("cc") or pytest.skip("no C compiler")
    names, uuids, *mib = zip(*gpus, strict=True)
    text = SOURCE.replace("INIT;", f"{init};").replace("SECONDS", str(seconds))
    for word, cells in (("NAMES", names), ("UUIDS", uuids)):
        text = text.replace(f"{{{word}}}", "{%s}" % ", ".join(f'"{cell}"' for cell in cells))
    text = text.replace("{MIB}", "{%s}" % ", ".join("{%d, %d}" % pair for pair in zip(*mib)))
    path = folder / "libnvidia-ml.so.1"
    # -Bsymbolic: its functions call each other, not those of the same names in TensorFlow.
    command = [compiler, "-x", "c", "-", "-shared", "-fPIC", "-Wl,-Bsymbolic", "-o", str(path)]
    subprocess.run(command, input=text, text=True, check=True)
    return path


def use(monkeypatch, library):
    """Has pynvml find this library in its next call, for one test; None: it finds none."""
    def load(name):
        assert name == "libnvidia-ml.so.1"
        if library is None:
            raise OSError(f"{name}: cannot open shared object file")
        return ctypes.CDLL(str(library))

    monkeypatch.setattr(pynvml, "CDLL", load)
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
