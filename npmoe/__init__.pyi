"""What `npmoe` hands out, for type checkers; the module itself loads these at first use."""

from npmoe.config import KVCacheConfig as KVCacheConfig
from npmoe.config import KVWindows as KVWindows
from npmoe.engine.output import Choice as Choice
from npmoe.engine.output import Completion as Completion
from npmoe.engine.output import Timings as Timings
from npmoe.formats.kv_cache import dequantize_kv_cache_fp4 as dequantize_kv_cache_fp4
from npmoe.formats.kv_cache import dequantize_kv_cache_fp8 as dequantize_kv_cache_fp8
from npmoe.formats.kv_cache import dequantize_kv_cache_int4 as dequantize_kv_cache_int4
from npmoe.formats.kv_cache import dequantize_kv_cache_int4_asym as dequantize_kv_cache_int4_asym
from npmoe.formats.kv_cache import dequantize_kv_cache_int8 as dequantize_kv_cache_int8
from npmoe.formats.kv_cache import dequantize_kv_cache_mxfp4 as dequantize_kv_cache_mxfp4
from npmoe.formats.kv_cache import dequantize_kv_cache_nvfp4 as dequantize_kv_cache_nvfp4
from npmoe.formats.kv_cache import quantize_kv_cache_fp4 as quantize_kv_cache_fp4
from npmoe.formats.kv_cache import quantize_kv_cache_fp8 as quantize_kv_cache_fp8
from npmoe.formats.kv_cache import quantize_kv_cache_int4 as quantize_kv_cache_int4
from npmoe.formats.kv_cache import quantize_kv_cache_int4_asym as quantize_kv_cache_int4_asym
from npmoe.formats.kv_cache import quantize_kv_cache_int8 as quantize_kv_cache_int8
from npmoe.formats.kv_cache import quantize_kv_cache_mxfp4 as quantize_kv_cache_mxfp4
from npmoe.formats.kv_cache import quantize_kv_cache_nvfp4 as quantize_kv_cache_nvfp4
from npmoe.llm import LLM as LLM
from npmoe.sampling import SamplingParams as SamplingParams

__version__: str
