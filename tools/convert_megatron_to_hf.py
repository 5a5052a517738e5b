"""`megagspo convert megatron-to-hf` as a script: python tools/convert_megatron_to_hf.py MEGATRON_DIR
HF_DIR"""

import sys

from megagspo.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["convert", "megatron-to-hf"]
    main()
