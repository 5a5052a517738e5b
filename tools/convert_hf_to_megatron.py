"""`megagspo convert hf-to-megatron` as a script: python tools/convert_hf_to_megatron.py HF_DIR
MEGATRON_DIR"""

import sys

from megagspo.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["convert", "hf-to-megatron"]
    main()
