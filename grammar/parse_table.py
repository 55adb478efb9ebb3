"""The LALR(1) table of titan.lark, written by `python -m titan.grammar.tables`; not for editing."""

# ruff: noqa: E501
GRAMMAR = 2905435349
ACCEPTING = 5

# origin, builder, one sign per symbol (+ kept, - dropped), whether a single value passes through
RULES = """\
___body_star_2 ___body_star_2 +++ 0
___body_star_2 ___body_star_2 ++ 0
___items_star_3 ___items_star_3 -+ 0
___items_star_3 ___items_star_3 +-+ 0
__start_star_0 __start_star_0 -+ 0
__start_star_0 __start_star_0 +-+ 0
__statement_star_1 __statement_star_1 +++ 0
__statement_star_1 __statement_star_1 ++ 0
_body _body -- 0
_body _body -+- 0
_body _body -++- 0
_body _body -+++- 0
_body _body -++- 0
_items _items +- 0
_items _items ++- 0
_items _items ++ 0
_items _items + 0
_next_limit _next_limit - 0
_next_limit _next_limit - 0
_separator _separator - 0
_separator _separator - 0
entry entry +++ 0
expression binary +++ 0
expression expression + 1
limit limit +++-+ 0
limit limit +++ 0
modified with_block +-+ 0
modified modified + 1
primary primary -+- 1
primary list_of -- 0
primary list_of -+- 0
primary call +-- 0
primary call +-+- 0
primary block ++ 0
primary name + 0
primary quantity + 0
primary string + 0
primary bare_block + 0
product product + 1
product binary +++ 0
start start . 0
start start +- 0
start start ++- 0
start start ++ 0
start start + 0
statement objective ++-++ 0
statement objective ++-+ 0
statement objective ++ 0
statement import_statement -+ 0
statement section ++ 0
statement statement + 1
"""

# one line per state: action, then the symbols that call for it; ~n reduces by rule n
STATES = """\
~40 $END; 1 DIRECTION; 2 IMPORT; 3 NAME; 4 entry; 5 start; 6 statement
7 NAME
8 NAME
9 LBRACE; 10 RELATION; 11 _body
~50 $END _NEWLINE
.
~44 $END; 12 _NEWLINE; 13 __start_star_0
~47 $END _NEWLINE; 14 _SUBJECT_TO
~48 $END _NEWLINE
15 NAME; 16 RBRACE; 17 entry
9 LBRACE; 18 LPAR; 19 LSQB; 20 NAME; 21 QUANTITY; 22 STRING; 23 _body; 24 expression; 25 modified; 26 primary; 27 product
~49 $END _NEWLINE
~41 $END; 1 DIRECTION; 2 IMPORT; 3 NAME; 4 entry; 28 statement
~43 $END; 29 _NEWLINE
30 NAME; 31 limit
10 RELATION
~8 $END AND COMMA OF PRODUCT RBRACE RPAR RSQB SUM WITH _NEWLINE
32 COMMA; 33 RBRACE; 34 _NEWLINE; 35 ___body_star_2; 36 _separator
9 LBRACE; 18 LPAR; 19 LSQB; 20 NAME; 21 QUANTITY; 22 STRING; 23 _body; 37 expression; 25 modified; 26 primary; 27 product
9 LBRACE; 18 LPAR; 19 LSQB; 20 NAME; 21 QUANTITY; 38 RSQB; 22 STRING; 23 _body; 39 _items; 40 expression; 25 modified; 26 primary; 27 product
~34 $END AND COMMA OF PRODUCT RBRACE RPAR RSQB SUM WITH _NEWLINE; 9 LBRACE; 41 LPAR; 42 _body
~35 $END AND COMMA OF PRODUCT RBRACE RPAR RSQB SUM WITH _NEWLINE
~36 $END AND COMMA OF PRODUCT RBRACE RPAR RSQB SUM WITH _NEWLINE
~37 $END AND COMMA OF PRODUCT RBRACE RPAR RSQB SUM WITH _NEWLINE
~21 $END COMMA RBRACE _NEWLINE; 43 SUM
~38 $END AND COMMA OF PRODUCT RBRACE RPAR RSQB SUM _NEWLINE; 44 WITH
~27 $END AND COMMA OF PRODUCT RBRACE RPAR RSQB SUM WITH _NEWLINE
~23 $END AND COMMA OF RBRACE RPAR RSQB SUM _NEWLINE; 45 PRODUCT
~4 $END _NEWLINE
~42 $END; 1 DIRECTION; 2 IMPORT; 3 NAME; 4 entry; 46 statement
47 RELATION
~46 $END _NEWLINE; 48 AND; 49 COMMA; 50 __statement_star_1; 51 _next_limit
~19 NAME RBRACE
~9 $END AND COMMA OF PRODUCT RBRACE RPAR RSQB SUM WITH _NEWLINE
~20 NAME RBRACE
32 COMMA; 52 RBRACE; 34 _NEWLINE; 53 _separator
15 NAME; 54 RBRACE; 55 entry
56 RPAR; 43 SUM
~29 $END AND COMMA OF PRODUCT RBRACE RPAR RSQB SUM WITH _NEWLINE
57 RSQB
58 COMMA; ~16 RPAR RSQB; 43 SUM; 59 ___items_star_3
9 LBRACE; 18 LPAR; 19 LSQB; 20 NAME; 21 QUANTITY; 60 RPAR; 22 STRING; 23 _body; 61 _items; 40 expression; 25 modified; 26 primary; 27 product
~33 $END AND COMMA OF PRODUCT RBRACE RPAR RSQB SUM WITH _NEWLINE
9 LBRACE; 18 LPAR; 19 LSQB; 20 NAME; 21 QUANTITY; 22 STRING; 23 _body; 25 modified; 26 primary; 62 product
9 LBRACE; 63 _body
9 LBRACE; 18 LPAR; 19 LSQB; 20 NAME; 21 QUANTITY; 22 STRING; 23 _body; 64 modified; 26 primary
~5 $END _NEWLINE
9 LBRACE; 18 LPAR; 19 LSQB; 20 NAME; 21 QUANTITY; 22 STRING; 23 _body; 65 expression; 25 modified; 26 primary; 27 product
~17 NAME
~18 NAME
~45 $END _NEWLINE; 48 AND; 49 COMMA; 66 _next_limit
30 NAME; 67 limit
~10 $END AND COMMA OF PRODUCT RBRACE RPAR RSQB SUM WITH _NEWLINE
15 NAME; 68 RBRACE; 69 entry
~12 $END AND COMMA OF PRODUCT RBRACE RPAR RSQB SUM WITH _NEWLINE
~1 COMMA RBRACE _NEWLINE
~28 $END AND COMMA OF PRODUCT RBRACE RPAR RSQB SUM WITH _NEWLINE
~30 $END AND COMMA OF PRODUCT RBRACE RPAR RSQB SUM WITH _NEWLINE
9 LBRACE; 18 LPAR; 19 LSQB; 20 NAME; 21 QUANTITY; ~13 RPAR RSQB; 22 STRING; 23 _body; 70 expression; 25 modified; 26 primary; 27 product
71 COMMA; ~15 RPAR RSQB
~31 $END AND COMMA OF PRODUCT RBRACE RPAR RSQB SUM WITH _NEWLINE
72 RPAR
~22 $END AND COMMA OF RBRACE RPAR RSQB SUM _NEWLINE; 45 PRODUCT
~26 $END AND COMMA OF PRODUCT RBRACE RPAR RSQB SUM WITH _NEWLINE
~39 $END AND COMMA OF PRODUCT RBRACE RPAR RSQB SUM _NEWLINE; 44 WITH
~25 $END AND COMMA _NEWLINE; 73 OF; 43 SUM
30 NAME; 74 limit
~7 $END AND COMMA _NEWLINE
~11 $END AND COMMA OF PRODUCT RBRACE RPAR RSQB SUM WITH _NEWLINE
~0 COMMA RBRACE _NEWLINE
~2 COMMA RPAR RSQB; 43 SUM
9 LBRACE; 18 LPAR; 19 LSQB; 20 NAME; 21 QUANTITY; ~14 RPAR RSQB; 22 STRING; 23 _body; 75 expression; 25 modified; 26 primary; 27 product
~32 $END AND COMMA OF PRODUCT RBRACE RPAR RSQB SUM WITH _NEWLINE
76 NAME
~6 $END AND COMMA _NEWLINE
~3 COMMA RPAR RSQB; 43 SUM
~24 $END AND COMMA _NEWLINE
"""
