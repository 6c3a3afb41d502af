# Commits, packs with two threads, checks and reads. Git forks and starts itself over and over.
command -v git > /dev/null || {
    echo "git is missing; get it by: apt-get install git"
    exit 77
}
export HOME="$PWD" GIT_CONFIG_NOSYSTEM=1
git init --quiet -b main history
cd history
git config user.name "A U Thor"
git config user.email author@example.com
for i in 1 2 3 4 5 6; do
    seq "$i" 20000 > "file$i"
    seq 1 "$((i * 500))" > growing
    git add --all
    GIT_AUTHOR_DATE="2020-01-01T00:00:0$i" GIT_COMMITTER_DATE="2020-01-01T00:00:0$i" \
        git commit --quiet --message="commit $i"
done
git repack -adq --threads=2
git fsck --full
git log --stat > ../log
sha256sum < ../log
git rev-parse HEAD
