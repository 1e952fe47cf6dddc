"""Both ways to every operator: ``python ops/test_packaging.py [--imports-only | --npu-e2e]``."""

from twinkle.aten.harness.packaging import main

if __name__ == "__main__":
    raise SystemExit(main())
