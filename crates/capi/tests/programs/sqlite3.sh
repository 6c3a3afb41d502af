# Fills a table and an index, joins, deletes, and checks the file.
command -v sqlite3 > /dev/null || {
    echo "sqlite3 is missing; get it by: apt-get install sqlite3"
    exit 77
}
sqlite3 base <<SQL
CREATE TABLE t(a INTEGER PRIMARY KEY, b TEXT, c REAL);
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 300000)
    INSERT INTO t SELECT i, hex(i * 7919 % 100003), i * 0.5 FROM n;
CREATE INDEX by_b ON t(b);
SELECT count(*), sum(c), max(b) FROM t;
SELECT b, count(*) AS k FROM t GROUP BY b ORDER BY k DESC, b LIMIT 5;
SELECT sum(length(x.b || y.b)) FROM t AS x JOIN t AS y ON x.b = y.b;
DELETE FROM t WHERE a % 3 = 0;
VACUUM;
PRAGMA integrity_check;
SQL
