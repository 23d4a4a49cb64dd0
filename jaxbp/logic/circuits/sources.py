"""Names and expressions of the C and Verilog export of circuits, and C source."""

import re
import string
from collections.abc import Sequence

import numpy as np

EXPRESSIONS = (
    "{zero}",
    "{a} & {b}",
    "{a} & ~{b}",
    "{a}",
    "~{a} & {b}",
    "{b}",
    "{a} ^ {b}",
    "{a} | {b}",
    "~({a} | {b})",
    "~({a} ^ {b})",
    "~{b}",
    "{a} | ~{b}",
    "~{a}",
    "~{a} | {b}",
    "~({a} & {b})",
    "{one}",
)
"""The 16 functions of two bits, in operators that C, Verilog, JavaScript, and Python share."""

_C = """
alignas alignof auto bool break case char const constexpr continue default do double else enum extern false float
for goto if inline int long nullptr register restrict return short signed sizeof static static_assert struct switch
thread_local true typedef typeof typeof_unqual union unsigned void volatile while asm fortran main
"""
_C_LIBRARY = """
BIG_ENDIAN BYTE_ORDER EXIT_FAILURE EXIT_SUCCESS FD_CLR FD_ISSET FD_SET FD_SETSIZE FD_ZERO LITTLE_ENDIAN MB_CUR_MAX
NFDBITS NULL PDP_ENDIAN RAND_MAX WCONTINUED WEXITED WEXITSTATUS WIFCONTINUED WIFEXITED WIFSIGNALED WIFSTOPPED WNOHANG
WNOWAIT WSTOPPED WSTOPSIG WTERMSIG WUNTRACED a64l abort abs aligned_alloc alloca arc4random arc4random_buf
arc4random_uniform asctime at_quick_exit atexit atof atoi atol atoll bcmp bcopy be16toh be32toh be64toh bsearch bzero
calloc clearenv clock ctime dcgettext dgettext difftime div drand48 drand48_r ecvt ecvt_r erand48 erand48_r execl
execle execlp execv execve execvp execvpe exit explicit_bzero fclose fcvt fcvt_r fd_mask fd_set feclearexcept fegetenv
fegetexceptflag fegetround feholdexcept feof feraiseexcept ferror fesetenv fesetexceptflag fesetround fetestexcept
feupdateenv fflush ffs ffsimax ffsl ffsll fgetc fgets fopen fork fprintf fprintf_unlocked fputc fputc_unlocked fputs
fputs_unlocked fread free freopen fscanf fseek ftell fwrite fwrite_unlocked gamma_r gammaf_r gammal_r gcvt getc getchar
getenv getloadavg getsubopt gettext gmtime htobe16 htobe32 htobe64 htole16 htole32 htole64 i386 imaxabs index initstate
initstate_r isalnum isalpha isascii isblank iscntrl isdigit isgraph islower isprint ispunct isspace isupper iswalnum
iswalpha iswblank iswcntrl iswdigit iswgraph iswlower iswprint iswpunct iswspace iswupper iswxdigit isxdigit jrand48
jrand48_r l64a labs lcong48 lcong48_r ldiv le16toh le32toh le64toh lgamma_r lgammaf_r lgammal_r linux llabs lldiv
localtime longjmp lrand48 lrand48_r malloc mblen mbstowcs mbtowc memccpy memchr memcmp memcpy memmem memmove mempcpy
memrchr memset mkdtemp mkstemp mkstemps mktemp mktime mrand48 mrand48_r nrand48 nrand48_r offsetof on_exit perror
posix_memalign printf printf_unlocked pselect putc putc_unlocked putchar putchar_unlocked putenv puts puts_unlocked
qecvt qecvt_r qfcvt qfcvt_r qgcvt qsort qsort_r quick_exit raise rand rand_r random random_r rawmemchr realloc
reallocarray reallocf realpath remove rename rewind rindex rpmatch scanf seed48 seed48_r select setbuf setenv setjmp
setlocale setstate setstate_r setvbuf signal snprintf sprintf srand srand48 srand48_r srandom srandom_r sscanf stpcpy
stpncpy strcasecmp strcasecmp_l strcasestr strcat strchr strchrnul strcmp strcoll strcoll_l strcpy strcspn strdup
strerror strerror_l strerror_r strfmon strfromd strfromf strfroml strftime strlcat strlcpy strlen strncasecmp
strncasecmp_l strncat strncmp strncpy strndup strnlen strpbrk strrchr strsep strsignal strspn strstr strtod strtof
strtok strtok_r strtol strtold strtoll strtoq strtoul strtoull strtouq strverscmp strxfrm strxfrm_l system time tmpfile
tmpnam toascii tolower toupper towlower towupper u_char u_int u_long u_short uint ulong ungetc unix unsetenv ushort
valloc vfprintf vfscanf vprintf vscanf vsnprintf vsprintf vsscanf wcstombs wctomb
"""
_C_MATHS = """
acos acosh asin asinh atan atan2 atanh cabs cacos cacosh carg casin casinh catan catanh cbrt ccos ccosh ceil cexp cimag
clog clog10 conj copysign cos cosh cpow cproj creal csin csinh csqrt ctan ctanh drem erf erfc exp exp10 exp2 expm1 fabs
fdim finite floor fma fmax fmin fmod frexp gamma hypot ilogb isinf isnan j0 j1 jn ldexp lgamma llrint llround log log10
log1p log2 logb lrint lround modf nan nearbyint nextafter nexttoward pow pow10 remainder remquo rint round roundeven
scalb scalbln scalbn signbit significand sin sincos sinh sqrt tan tanh tgamma trunc y0 y1 yn
"""
_C_KINDS = ["", "f", "l", "f16", "f32", "f64", "f128", "f32x", "f64x", "f128x", "d32", "d64", "d128"]
_OF_KINDS = [word + kind for word in _C_MATHS.split() for kind in _C_KINDS]
C_WORDS = frozenset([*_C.split(), *_C_LIBRARY.split(), *_OF_KINDS])
"""Keywords, compilers' built-in functions, and names that the included headers declare."""
_C_RESERVED = re.compile(r"_exit|_[A-Z_]\w*|\w+_t|(U?INT|PTRDIFF|SIG_ATOMIC|SIZE|WCHAR|WINT)\w*_(C|MAX|MIN)", re.ASCII)
_VERILOG = """
always and assign automatic begin buf bufif0 bufif1 case casex casez cell cmos config deassign default defparam
design disable edge else end endcase endconfig endfunction endgenerate endmodule endprimitive endspecify endtable
endtask event for force forever fork function generate genvar highz0 highz1 if ifnone incdir include initial inout
input instance integer join large liblist library localparam macromodule medium module nand negedge nmos nor
noshowcancelled not notif0 notif1 or output parameter pmos posedge primitive pull0 pull1 pulldown pullup
pulsestyle_ondetect pulsestyle_onevent rcmos real realtime reg release repeat rnmos rpmos rtran rtranif0 rtranif1
scalared showcancelled signed small specify specparam strong0 strong1 supply0 supply1 table task time tran tranif0
tranif1 tri tri0 tri1 triand trior trireg unsigned use uwire vectored wait wand weak0 weak1 while wire wor xnor xor
accept_on alias always_comb always_ff always_latch assert assume before bind bins binsof bit break byte chandle
checker class clocking const constraint context continue cover covergroup coverpoint cross dist do endchecker
endclass endclocking endgroup endinterface endpackage endprogram endproperty endsequence enum eventually expect
export extends extern final first_match foreach forkjoin global iff ignore_bins illegal_bins implements implies
import inside int interconnect interface intersect join_any join_none let local logic longint matches modport
nettype new nexttime null package packed priority program property protected pure rand randc randcase randsequence
ref reject_on restrict return s_always s_eventually s_nexttime s_until s_until_with sequence shortint shortreal
soft solve static string strong struct super sync_accept_on sync_reject_on tagged this throughout timeprecision
timeunit type typedef union unique unique0 until until_with untyped var virtual void wait_order weak wildcard with
within
"""
VERILOG_WORDS = frozenset(_VERILOG.split())


def check_name(op: str, name: str, words: frozenset[str]) -> None:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise ValueError(
            f"{op}: name is {name!r}; wants ASCII letters, digits, and underscores, not beginning with a digit"
        )
    if name in words or (words is C_WORDS and _C_RESERVED.fullmatch(name)):
        language = "C" if words is C_WORDS else "Verilog"
        raise ValueError(f"{op}: name is {name!r}, which is reserved in {language}; wants another name")


# The C code computes a gate for a block of words at a time, to read the gate's table entry once per block.
_C_SOURCE = string.Template(r"""#include <stddef.h>
#include <stdint.h>

/* The number of words that are computed at a time. If it is 1, the memory and the time of a single sample are least. */
#ifndef ${name}_block
#define ${name}_block 16
#endif
/* Memory is static. Where there is an operating system, each thread has its own memory, so that threads may call the
   functions at the same time. Elsewhere, only one call may run at a time. */
#ifndef ${name}_static
#if defined _MSC_VER
#define ${name}_static static __declspec(thread)
#elif defined __unix__ || defined __APPLE__ || defined _WIN32
#define ${name}_static static __thread
#else
#define ${name}_static static
#endif
#endif
typedef struct { $wire y, a, b; } ${name}_gate;

/* Gates of one function: y = expression(a, b). No gate reads a result of another one of them. */
#define ${name}_FUNCTION(function, expression) \
  static void function(const ${name}_gate *gates, size_t n, const uint32_t *restrict x, uint32_t *restrict y) { \
    for (size_t i = 0; i < n; i++) { \
      const uint32_t *a = x + ${name}_block * (size_t)gates[i].a; \
      const uint32_t *b = x + ${name}_block * (size_t)gates[i].b; \
      uint32_t *to = y + ${name}_block * (size_t)gates[i].y; \
      for (size_t k = 0; k < ${name}_block; k++) to[k] = expression; \
      (void)a, (void)b; \
    } \
  }
$functions

/* A function, and the number of its gates in the table of gates. They follow the gates of the step before. Calls
   through this table keep the code small, so that compilers are fast. */
typedef struct {
  void (*function)(const ${name}_gate *, size_t, const uint32_t *, uint32_t *);
  size_t n;
} ${name}_step;
$definitions
static const uint32_t ${name}_outputs[] = {$output_rows};

/* Returns the values of the words of x from w on, up to a block of words. The rest of the block is 0. */
static const uint32_t *${name}_values(size_t words, size_t w, const uint32_t *x) {
  ${name}_static uint32_t memory[${name}_block * ($rows + 1)];
  uint32_t *const values = memory + (-(uintptr_t)memory / sizeof *memory) % ${name}_block; /* begins a cache line */
  const size_t block = ${name}_block, n = words - w < block ? words - w : block;
  for (size_t i = 0; i < $inputs; i++)
    for (size_t k = 0; k < block; k++) values[i * block + k] = k < n ? x[i * words + w + k] : 0;
$calls
  return values;
}

/* x[$inputs][words] to y[$outputs][words]: bit k of x[i][w] is input i of sample 32 w + k, in y likewise. */
void $name(size_t words, const uint32_t *x, uint32_t *y) {
  const size_t block = ${name}_block;
  for (size_t w = 0; w < words; w += block) {
    const uint32_t *const values = ${name}_values(words, w, x);
    const size_t n = words - w < block ? words - w : block;
    for (size_t i = 0; i < $outputs; i++) {
      const uint32_t *from = values + block * ${name}_outputs[i];
      for (size_t k = 0; k < n; k++) y[i * words + w + k] = from[k];
    }
  }
}
""")
# Plane p has bit p of each sample's sum over the outputs of a class.
_C_CLASSIFY = string.Template(r"""
/* Sums the outputs of a class, with a counter in which each plane's carry waits for another carry. */
static void ${name}_sum(const uint32_t *values, const uint32_t *outputs, uint32_t (*restrict sum)[${name}_block]) {
  enum { block = ${name}_block, group = $group, planes = $planes };
  uint32_t waiting[planes][block], carry[block];
  for (size_t p = 0; p < planes; p++)
    for (size_t k = 0; k < block; k++) sum[p][k] = 0;
  for (size_t i = 0; i < group; i++) {
    const uint32_t *value = values + block * outputs[i];
    size_t p = 0;
    for (size_t k = 0; k < block; k++) carry[k] = value[k];
    for (; i >> p & 1; p++)
      for (size_t k = 0; k < block; k++) {
        const uint32_t a = sum[p][k], b = waiting[p][k], odd = a ^ b;
        sum[p][k] = odd ^ carry[k];
        carry[k] = (a & b) | (odd & carry[k]);
      }
    for (size_t k = 0; k < block; k++) waiting[p][k] = carry[k];
  }
  for (size_t p = 0; p < planes; p++)
    for (size_t q = p; group >> p & 1 && q < planes; q++)
      for (size_t k = 0; k < block; k++) {
        const uint32_t both = sum[q][k] & waiting[p][k];
        sum[q][k] ^= waiting[p][k];
        waiting[p][k] = both;
      }
}

/* The class of each of the 32 words samples of x, 0 to $last_class: the first class with the most outputs on. */
void ${name}_classify_words(size_t words, const uint32_t *x, int *classes) {
  enum { block = ${name}_block, planes = $planes, digits = $digits };
  for (size_t w = 0; w < words; w += block) {
    uint32_t sum[planes][block], most[planes][block] = {{0}}, class[digits][block] = {{0}};
    const uint32_t *const values = ${name}_values(words, w, x);
    for (size_t c = 0; c < $classes; c++) {
      ${name}_sum(values, ${name}_outputs + c * $group, sum);
      for (size_t k = 0; k < block; k++) {
        uint32_t more = 0, less = 0;
        for (size_t p = planes; p-- > 0;) {
          more |= sum[p][k] & ~most[p][k] & ~less;
          less |= ~sum[p][k] & most[p][k] & ~more;
        }
        for (size_t p = 0; p < planes; p++) most[p][k] ^= (most[p][k] ^ sum[p][k]) & more;
        for (size_t d = 0; d < digits; d++) class[d][k] = (class[d][k] & ~more) | (c >> d & 1 ? more : 0);
      }
    }
    for (size_t k = 0; k < block && w + k < words; k++)
      for (size_t j = 0; j < 32; j++) {
        classes[32 * (w + k) + j] = 0;
        for (size_t d = 0; d < digits; d++) classes[32 * (w + k) + j] |= (int)(class[d][k] >> j & 1) << d;
      }
  }
}

/* The class of one sample. bits[$inputs] are its inputs: 0 is off, any other number is on. */
int ${name}_classify(const uint8_t *bits) {
  int classes[32];
  ${name}_static uint32_t x[$inputs];
  for (size_t i = 0; i < $inputs; i++) x[i] = bits[i] != 0;
  ${name}_classify_words(1, x, classes);
  return classes[0];
}
""")


class CSource:
    """C99 source of a function that evaluates a circuit on blocks of 512 samples. The methods `add_...` add its steps.

    The function's memory consists of rows. A row holds one bit of each sample of a block. The inputs are in the first
    rows. The other rows are 0 at first.
    """

    def __init__(self, name: str):
        self.name = name
        self._functions: dict[int, str] = {}
        self._gates: list[str] = []
        self._steps: list[str] = []
        self._definitions: list[str] = []
        self._calls: list[str] = []
        self._rows = None
        self._wire = "uint16_t"

    def add_gates(self, function: int, reads: int, writes: int, gates: np.ndarray) -> None:
        """Add gates `(y, a, b)` with one function, `gates (n, 3)`, which do not read each other.

        They read the rows `reads + a` and `reads + b`, and write the row `writes + y`.
        """
        name = self.name
        expression = EXPRESSIONS[function].format(a="a[k]", b="b[k]", zero="0", one="~(uint32_t)0")
        self._functions[function] = f"{name}_FUNCTION({name}_function{function}, {expression})"
        self._gates += [f"  {{{y}, {a}, {b}}},\n" for y, a, b in gates.tolist()]
        self._steps.append(f"  {{{name}_function{function}, {len(gates)}}},\n")
        if gates.max() >= 2**16:
            self._wire = "uint32_t"
        if self._rows != (reads, writes):
            self._rows = reads, writes
            self._calls.append("")
        step = f"step->function(gates, step->n, {_row(reads)}, {_row(writes)}), gates += step->n, step++;"
        self._calls[-1] = f"  while (step < {name}_steps + {len(self._steps)}) {step}"

    def add_call(self, definition: str, function: str, *arguments: str, reads: int, writes: int) -> None:
        """Add a definition and a call. The last two arguments of the call are the rows `reads` and `writes`."""
        self._definitions.append(definition)
        self._calls.append(f"  {function}({', '.join([*arguments, _row(reads), _row(writes)])});")
        self._rows = None

    def text(self, inputs: int, outputs: Sequence[int], rows: int, classes: int | None) -> str:
        """Return the source described in `BitCircuit.to_c`. `outputs` has the row of each output."""
        sizes = dict(name=self.name, inputs=inputs, outputs=len(outputs), rows=rows)
        definitions, calls = self._definitions, self._calls
        if self._steps:
            tables = {"gate": self._gates, "step": self._steps}
            definitions = definitions + [
                f"static const {self.name}_{kind} {self.name}_{kind}s[] = {{\n{''.join(lines)}}};"
                for kind, lines in tables.items()
            ]
            pointers = (
                f"const {self.name}_{kind} *{pointer} = {self.name}_{kind}s;"
                for kind, pointer in (("gate", "gates"), ("step", "step"))
            )
            calls = [f"  {' '.join(pointers)}", *calls]
        source = _C_SOURCE.substitute(
            sizes,
            wire=self._wire,
            functions="\n".join(self._functions[function] for function in sorted(self._functions)),
            definitions="\n".join(definitions),
            calls="\n".join(calls),
            output_rows=", ".join(map(str, outputs)),
        )
        if classes is None:
            return source
        return source + _C_CLASSIFY.substitute(sizes, last_class=classes - 1, **class_sizes(len(outputs), classes))


def _row(row: int) -> str:
    return f"values + block * {row}" if row else "values"


def class_sizes(outputs: int, classes: int) -> dict[str, int]:
    """Return the sizes of groups of outputs, of their counts in bits, and of the number of a class in bits."""
    group = outputs // classes
    digits = max(1, (classes - 1).bit_length())
    return dict(classes=classes, group=group, planes=group.bit_length(), digits=digits)
