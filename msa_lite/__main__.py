"""`python -m msa_lite` is `msa-lite`."""

from msa_lite.cli import main

if __name__ == "__main__":
    main()
